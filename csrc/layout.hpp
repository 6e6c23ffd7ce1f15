#pragma once
// Where n-dimensional arrays lie in memory: as rows the kernels can read, and against each other.

#include <cstddef>
#include <cstdint>

#include "columns.hpp"

namespace pystale {

struct Layout {
    std::byte* data = nullptr;
    std::size_t item_size = 0;
    int axes = 0;
    const std::ptrdiff_t* shape = nullptr;    // entries along each axis
    const std::ptrdiff_t* strides = nullptr;  // bytes along each axis
};

// Entries in all.
[[nodiscard]] std::size_t entries(const Layout& layout) noexcept;

// Whether the two may share a byte (the spans from first to last byte intersect).
[[nodiscard]] bool may_overlap(const Layout& a, const Layout& b) noexcept;

// Whether every entry of `a` is the same memory as the entry of `b` at the same place.
[[nodiscard]] bool same_entries(const Layout& a, const Layout& b) noexcept;

// Whether no two entries share memory. May say no for arrays whose axes interleave without meeting.
[[nodiscard]] bool entries_are_distinct(const Layout& layout);

// fill_mask of kernels.hpp for arrays of one shape and any number of axes, at most kMaxAxes. `steps` and `mask` give
// element and byte order; mask_layout is unused without a mask.
inline constexpr int kMaxAxes = 64;
void fill_mask(const Column& steps, const Layout& steps_layout, const Column* mask, const Layout& mask_layout,
               std::int64_t cutoff, const Layout& out);

}  // namespace pystale
