#include "columns.hpp"

#include <limits>
#include <stdexcept>
#include <string>

#include "loops.hpp"

namespace pystale {
namespace {

// The address of an entry. Not computed for empty pieces, whose address may lie outside the array.
const std::byte* address(const Column& column, std::size_t first) noexcept {
    return column.data + static_cast<std::ptrdiff_t>(first) * column.stride;
}

// Side by side and aligned, so that the loops can read them where they lie, if the byte order lets them.
bool is_contiguous(const Column& column) noexcept {
    const std::size_t size = item_size(column.element);
    return !column.read && (column.stride == static_cast<std::ptrdiff_t>(size) || column.size <= 1) &&
           reinterpret_cast<std::uintptr_t>(column.data) % size == 0;
}

Entries contiguous(const Column& column, bool swap, std::size_t first, std::size_t count, std::byte* block) noexcept {
    const std::byte* const at = address(column, first);
    if (!swap && is_contiguous(column)) return {at, column.element};
    loops::gather(at, column.stride, item_size(column.element), swap, count, block);
    return {block, column.element};
}

void refuse_past_int64(const Column& column, std::size_t first, std::size_t count, const void* entries) {
    const auto* const values = static_cast<const std::uint64_t*>(entries);
    if (!loops::past_int64(values, count)) return;
    std::size_t at = 0;
    while (values[at] >> 63 == 0) ++at;
    throw std::domain_error(std::string(column.name) + "[" + std::to_string(column.origin + first + at) + "] is " +
                            std::to_string(values[at]) + "; the largest value allowed is " +
                            std::to_string(std::numeric_limits<std::int64_t>::max()));
}

}  // namespace

std::size_t item_size(Element element) noexcept {
    switch (element) {
        case Element::i8:
        case Element::u8:
            return 1;
        case Element::i16:
        case Element::u16:
            return 2;
        case Element::i32:
        case Element::u32:
            return 4;
        case Element::i64:
        case Element::u64:
            return 8;
    }
    return 0;
}

Entries load_entries(const Column& column, std::size_t first, std::size_t count, Block& block, bool* one) {
    if (column.read) {
        auto* const values = reinterpret_cast<std::int64_t*>(block.bytes);
        const int outcome = column.read(column.source, first, count, values);
        if (outcome < 0) throw ReadFailed{};
        if (one) {
            *one = outcome == kAllTheSame;
        } else if (outcome == kAllTheSame) {
            loops::repeat(values[0], count, values);
        }
        return {values, Element::i64};
    }
    if (one) *one = false;
    Entries entries = contiguous(column, column.swapped, first, count, block.bytes);
    if (column.element == Element::u64) {
        refuse_past_int64(column, first, count, entries.data);
        entries.element = Element::i64;
    }
    return entries;
}

void load_steps(const Column& column, std::size_t first, std::size_t count, std::int64_t* values) {
    if (count == 0) return;
    Block block;
    loops::widen(load_entries(column, first, count, block), count, values);
}

void load_flags(const Column& column, std::size_t first, std::size_t count, std::uint8_t* flags) {
    if (count == 0) return;
    Block block;
    if (column.read) {
        bool one = false;
        const Entries entries = load_entries(column, first, count, block, &one);
        loops::test(entries, one ? 1 : count, flags);
        if (one) std::memset(flags, flags[0], count);
        return;
    }
    // Zero is zero in both byte orders.
    loops::test(contiguous(column, false, first, count, block.bytes), count, flags);
}

bool is_readable(const Column& column) noexcept {
    return is_contiguous(column) && (!column.swapped || item_size(column.element) == 1);
}

const std::uint8_t* byte_entries(const Column& column) noexcept {
    const bool bytes = item_size(column.element) == 1 && is_contiguous(column);
    return bytes ? reinterpret_cast<const std::uint8_t*>(column.data) : nullptr;
}

}  // namespace pystale
