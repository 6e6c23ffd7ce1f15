#pragma once
// The loops themselves, over entries that lie side by side: what the kernels do to a block once it is readable.
//
// Each exists for every width and signedness of an entry and, where the toolchain can (multiversion.hpp), for several
// CPU levels. None of them allocates, fails or stops early.

#include <cstddef>
#include <cstdint>

#include "columns.hpp"
#include "kernels.hpp"

namespace pystale::loops {

// The most entries a call of `summary` takes: its counts are kept in int32.
inline constexpr std::size_t kLongestSummary = std::size_t{1} << 30;

// out[i] = mask[i] != 0 and steps[i] >= cutoff, as 0 or 1. cutoff >= 0. `mask` may be nullptr (all ones); `out` may be
// the mask itself.
void fill(Entries steps, const std::uint8_t* mask, std::size_t count, std::int64_t cutoff, std::uint8_t* out) noexcept;

// Whether fill would write a 1.
[[nodiscard]] bool any(Entries steps, const std::uint8_t* mask, std::size_t count, std::int64_t cutoff) noexcept;

// Smallest step that is not negative; negative when there is none.
[[nodiscard]] std::int64_t oldest(Entries steps, std::size_t count) noexcept;

[[nodiscard]] Summary summary(Entries steps, const std::uint8_t* mask, std::size_t count) noexcept;

// flags[i] = entries[i] != 0. `flags` may be the entries themselves.
void test(Entries entries, std::size_t count, std::uint8_t* flags) noexcept;

// Entries that are not zero.
[[nodiscard]] std::size_t count_flags(const std::uint8_t* mask, std::size_t count) noexcept;

// Entries of item_size bytes, any alignment: those of `one` where flags[i] is 1, zero where it is 0.
void spread(const std::uint8_t* flags, std::size_t count, std::size_t item_size, std::uint64_t one,
            std::byte* out) noexcept;

// values[i] = entries[i]
void widen(Entries entries, std::size_t count, std::int64_t* values) noexcept;

// Whether an entry is too large for int64.
[[nodiscard]] bool past_int64(const std::uint64_t* entries, std::size_t count) noexcept;

// Copies entries of item_size bytes, the next one `stride` bytes on, any alignment, to lie side by side in `block`;
// with the bytes of each the other way round if `swapped`.
void gather(const std::byte* at, std::ptrdiff_t stride, std::size_t item_size, bool swapped, std::size_t count,
            std::byte* block) noexcept;

// Words from words[0] on that are the same, at least 1. 1 <= count.
[[nodiscard]] std::size_t same_words(const std::uintptr_t* words, std::size_t count) noexcept;

// out[i] = value
void repeat(std::int64_t value, std::size_t count, std::int64_t* out) noexcept;

// The CPU level whose loops run.
[[nodiscard]] const char* level() noexcept;

}  // namespace pystale::loops
