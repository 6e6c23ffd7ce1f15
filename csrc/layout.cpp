#include "layout.hpp"

#include <algorithm>
#include <cstdlib>
#include <span>
#include <utility>

#include "kernels.hpp"

namespace pystale {
namespace {

// First byte and one past the last.
std::pair<std::uintptr_t, std::uintptr_t> bounds(const Layout& layout) noexcept {
    auto low = reinterpret_cast<std::uintptr_t>(layout.data);
    auto high = low + layout.item_size;
    for (int axis = 0; axis < layout.axes; ++axis) {
        const std::ptrdiff_t reach = layout.strides[axis] * (layout.shape[axis] - 1);
        (reach < 0 ? low : high) += static_cast<std::uintptr_t>(reach);
    }
    return {low, high};
}

struct Axis {
    std::ptrdiff_t size, steps, mask, out;

    // Whether stepping over this axis is stepping past the whole of `inner` in all three arrays.
    [[nodiscard]] bool continues(const Axis& inner) const noexcept {
        return steps == inner.steps * inner.size && mask == inner.mask * inner.size && out == inner.out * inner.size;
    }
};

}  // namespace

std::size_t entries(const Layout& layout) noexcept {
    std::size_t product = 1;
    for (int axis = 0; axis < layout.axes; ++axis) product *= static_cast<std::size_t>(layout.shape[axis]);
    return product;
}

bool may_overlap(const Layout& a, const Layout& b) noexcept {
    if (entries(a) == 0 || entries(b) == 0) return false;
    const auto [a_low, a_high] = bounds(a);
    const auto [b_low, b_high] = bounds(b);
    return a_low < b_high && b_low < a_high;
}

bool same_entries(const Layout& a, const Layout& b) noexcept {
    if (a.data != b.data || a.item_size != b.item_size || a.axes != b.axes) return false;
    for (int axis = 0; axis < a.axes; ++axis) {
        if (a.shape[axis] != b.shape[axis]) return false;
        if (a.shape[axis] > 1 && a.strides[axis] != b.strides[axis]) return false;
    }
    return true;
}

bool entries_are_distinct(const Layout& layout) {
    if (entries(layout) <= 1) return true;
    std::pair<std::ptrdiff_t, std::ptrdiff_t> axes[kMaxAxes];  // distance, size
    int used = 0;
    for (int axis = 0; axis < layout.axes; ++axis) {
        if (layout.shape[axis] > 1) axes[used++] = {std::abs(layout.strides[axis]), layout.shape[axis]};
    }
    std::sort(axes, axes + used);
    auto reach = static_cast<std::ptrdiff_t>(layout.item_size);
    for (const auto& [distance, size] : std::span(axes, static_cast<std::size_t>(used))) {
        if (distance < reach) return false;
        reach += distance * (size - 1);
    }
    return true;
}

void fill_mask(const Column& steps, const Layout& steps_layout, const Column* mask, const Layout& mask_layout,
               std::int64_t cutoff, const Layout& out) {
    if (entries(out) == 0) return;
    Axis axes[kMaxAxes];
    int used = 0;
    for (int axis = 0; axis < out.axes; ++axis) {
        if (out.shape[axis] == 1) continue;
        axes[used++] = {out.shape[axis], steps_layout.strides[axis], mask ? mask_layout.strides[axis] : 0,
                        out.strides[axis]};
    }
    // The order of the walk is free, so the axis whose steps lie closest together becomes the row. Not for uint64:
    // there the position of a value out of range is reported, in the order of the array.
    if (steps.element != Element::u64) {
        std::stable_sort(axes, axes + used,
                         [](const Axis& a, const Axis& b) { return std::abs(a.steps) > std::abs(b.steps); });
    }
    // Axes that continue one another become one, so that contiguous arrays are a single row.
    int rows = 0;
    for (int axis = 0; axis < used; ++axis) {
        if (rows > 0 && axes[rows - 1].continues(axes[axis])) {
            axes[axis].size *= axes[rows - 1].size;
            axes[rows - 1] = axes[axis];
        } else {
            axes[rows++] = axes[axis];
        }
    }
    const Axis row = rows > 0 ? axes[--rows] : Axis{1, 0, 0, 0};

    Column row_steps = steps;
    row_steps.size = static_cast<std::size_t>(row.size);
    row_steps.stride = row.steps;
    Column row_mask = mask ? *mask : Column{};
    row_mask.size = row_steps.size;
    row_mask.stride = row.mask;
    std::ptrdiff_t at[kMaxAxes] = {};
    std::ptrdiff_t steps_at = 0;
    std::ptrdiff_t mask_at = 0;
    std::ptrdiff_t out_at = 0;
    for (;;) {
        row_steps.data = steps.data + steps_at;
        if (mask) row_mask.data = mask->data + mask_at;
        fill_mask(row_steps, mask ? &row_mask : nullptr, cutoff, reinterpret_cast<std::uint8_t*>(out.data) + out_at,
                  row.out);
        row_steps.origin += row_steps.size;
        int axis = rows - 1;
        for (; axis >= 0; --axis) {
            const Axis& outer = axes[axis];
            steps_at += outer.steps;
            mask_at += outer.mask;
            out_at += outer.out;
            if (++at[axis] < outer.size) break;
            steps_at -= outer.steps * outer.size;
            mask_at -= outer.mask * outer.size;
            out_at -= outer.out * outer.size;
            at[axis] = 0;
        }
        if (axis < 0) return;
    }
}

}  // namespace pystale
