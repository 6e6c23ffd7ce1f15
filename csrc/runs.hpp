#pragma once
// Model steps as runs, and the questions of kernels.hpp over them.
//
// A response holds one run of equal model steps per weight version it lived through, so a few runs stand for any number
// of tokens, and every question costs the runs it touches. Words and units are those of kernels.hpp.
//
// Not synchronised: the caller serialises appends against everything else.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "columns.hpp"
#include "kernels.hpp"

namespace pystale {

// 16 bytes for a run of any length.
struct Run {
    std::int64_t step;
    std::int64_t end;  // tokens up to and including this run

    friend bool operator==(const Run&, const Run&) = default;
};

// Invariants: ends increase strictly and neighbours differ in step, so that equal sequences have equal runs.
class Runs {
  public:
    [[nodiscard]] std::size_t size() const noexcept {
        return runs_.empty() ? 0 : static_cast<std::size_t>(runs_.back().end);
    }
    [[nodiscard]] std::span<const Run> runs() const noexcept { return runs_; }
    [[nodiscard]] std::size_t capacity() const noexcept { return runs_.capacity(); }

    // Adds `count` tokens of `step` at the end. Throws std::invalid_argument past 2**63 - 1 tokens.
    void append(std::int64_t step, std::size_t count);
    // Adds all tokens of `other`, which may be this object. Nothing changes when it throws.
    void append(const Runs& other);

    // Index of the run that holds token `at` < size(); O(log runs).
    [[nodiscard]] std::size_t find(std::size_t at) const noexcept;

    // Tokens start, start + stride, ..., `count` of them, all within size(); stride may be negative. O(runs).
    [[nodiscard]] Runs slice(std::size_t start, std::ptrdiff_t stride, std::size_t count) const;

    friend bool operator==(const Runs&, const Runs&) = default;

  private:
    std::vector<Run> runs_;
};

// Throws what load_steps throws.
[[nodiscard]] Runs encode(const Column& steps);

// Writes size() steps.
void decode(const Runs& runs, std::int64_t* steps) noexcept;

// A column over runs, to be read where no run-wise form exists. `runs` must outlive it.
[[nodiscard]] Column as_column(const Runs& runs) noexcept;

[[nodiscard]] std::int64_t oldest_step(const Runs& steps) noexcept;
[[nodiscard]] bool has_trainable(const Runs& steps, const Column* mask, std::int64_t cutoff);
void fill_mask(const Runs& steps, const Column* mask, std::int64_t cutoff, std::uint8_t* out, std::ptrdiff_t stride);
[[nodiscard]] Summary summarise(const Runs& steps, const Column* mask, std::size_t first, std::size_t count);

}  // namespace pystale
