#pragma once
// The token rule, and the loops that ask it about every token of a response.
//
// Units are trainer steps. train_step T >= 1 is the step that will consume the tokens; a token's model step m is the
// trainer step whose update produced the weights that generated it. m < 0 marks a token no model generated (prompt,
// tool, environment).
//
//     staleness of a token    T - m - 1
//     fresh                   T - m - 1 < token_stale_threshold   <=>   m >= T - token_stale_threshold
//     staleness of a response T - min(m over m >= 0) - 1, 0 when there is no model token; never clamped
//     trainable               mask != 0 and m >= 0
//     expired                 staleness of the response >= stale_threshold, or it has trainable tokens and none is
//     fresh
//
// Source: the staleness equation of XTuner's asynchronous producer; that m < 0 never counts is decided here.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "columns.hpp"

namespace pystale {

// A threshold no token can reach: the rule is off.
inline constexpr std::int64_t kNoThreshold = std::numeric_limits<std::int64_t>::max();

// The oldest model step that is fresh at train_step >= 1 under threshold >= 0. A token counts iff its step is at least
// this, which for kNoThreshold means: iff a model generated it. Cannot overflow.
[[nodiscard]] constexpr std::int64_t oldest_fresh_step(std::int64_t train_step, std::int64_t threshold) noexcept {
    return std::max<std::int64_t>(train_step - threshold, 0);
}

// Staleness of a response whose oldest model step is `oldest` (-1: it has no model token).
[[nodiscard]] constexpr std::int64_t seq_staleness(std::int64_t oldest, std::int64_t train_step) noexcept {
    return oldest < 0 ? 0 : train_step - oldest - 1;
}

// What is worth remembering of a response: it decides every question of the rule at every later train step.
struct Summary {
    std::int64_t oldest = -1;            // smallest model step; -1: no model token
    std::int64_t newest_trainable = -1;  // largest step of a trainable token; -1: none
    std::size_t trainable = 0;           // tokens
    std::size_t model = 0;               // tokens

    constexpr void add(const Summary& other) noexcept {
        if (other.oldest >= 0) oldest = oldest < 0 ? other.oldest : std::min(oldest, other.oldest);
        newest_trainable = std::max(newest_trainable, other.newest_trainable);
        trainable += other.trainable;
        model += other.model;
    }
};

// A mask argument may be nullptr (all ones); otherwise it has as many entries as `steps`. Every function reads its
// columns forwards unless it says otherwise, and throws what load_steps and load_flags throw.

// Smallest model step; -1 when there is none.
[[nodiscard]] std::int64_t oldest_step(const Column& steps);

// Whether a token is trainable and its step is at least `cutoff`. Reads blocks from the tail, where fresh tokens are,
// and stops at the first block that has one: earlier entries are not looked at.
[[nodiscard]] bool has_trainable(const Column& steps, const Column* mask, std::int64_t cutoff);

// out[i * stride] = trainable and step >= cutoff, as 0 or 1. `out` may be the very memory of the mask, entry by entry;
// any other overlap is the caller's mistake.
void fill_mask(const Column& steps, const Column* mask, std::int64_t cutoff, std::uint8_t* out, std::ptrdiff_t stride);

[[nodiscard]] Summary summarise(const Column& steps, const Column* mask, std::size_t first, std::size_t count);

// Entries of [first, first + count) that are not zero.
[[nodiscard]] std::size_t count_flags(const Column& mask, std::size_t first, std::size_t count);

// Whether any of them is; reads blocks from the tail.
[[nodiscard]] bool has_flag(const Column& mask, std::size_t first, std::size_t count);

// Writes them as 0 or 1. `out` may be the very memory of the mask, entry by entry.
void copy_flags(const Column& mask, std::size_t first, std::size_t count, std::uint8_t* out, std::ptrdiff_t stride);

// The CPU level whose loops run: "x86-64-v4", "x86-64-v3" or "baseline" (what the compiler was told to assume).
[[nodiscard]] const char* cpu_level() noexcept;

// Checks that offsets are [0, ..., tokens], never decreasing, at least one. Throws std::invalid_argument naming the
// entry.
void check_offsets(const Column& offsets, std::size_t tokens);

// Where refresh_batch writes, one entry per response; strides in bytes.
struct BatchResult {
    std::byte* staleness;  // int64, any alignment
    std::ptrdiff_t staleness_stride;
    std::uint8_t* expired;  // 0 or 1
    std::ptrdiff_t expired_stride;
};

// Asks both rules about every response of a batch laid end to end. Response r has tokens [offsets[r], offsets[r + 1]);
// offsets were checked. Steps is a Column or Runs.
template <class Steps>
void refresh_batch(const Steps& steps, const Column* mask, const Column& offsets, std::int64_t train_step,
                   std::int64_t stale_threshold, std::int64_t token_stale_threshold, const BatchResult& result) {
    const std::int64_t cutoff = oldest_fresh_step(train_step, token_stale_threshold);
    const std::size_t responses = offsets.size - 1;
    std::int64_t ends[kBlock];
    std::size_t first = 0;
    for (std::size_t start = 0; start < responses; start += kBlock) {
        const std::size_t count = std::min(kBlock, responses - start);
        load_steps(offsets, start + 1, count, ends);
        for (std::size_t i = 0; i < count; ++i) {
            const auto end = static_cast<std::size_t>(ends[i]);
            const Summary summary = summarise(steps, mask, first, end - first);
            const std::int64_t staleness = seq_staleness(summary.oldest, train_step);
            const bool no_fresh = summary.newest_trainable >= 0 && summary.newest_trainable < cutoff;
            const auto row = static_cast<std::ptrdiff_t>(start + i);
            std::memcpy(result.staleness + row * result.staleness_stride, &staleness, sizeof staleness);
            result.expired[row * result.expired_stride] = staleness >= stale_threshold || no_fresh;
            first = end;
        }
    }
}

}  // namespace pystale
