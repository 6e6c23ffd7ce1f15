#include "columns.hpp"

#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace pystale {
namespace {

template <class T>
T swap_bytes(T value) noexcept {
    if constexpr (sizeof(T) == 2) return static_cast<T>(__builtin_bswap16(static_cast<std::uint16_t>(value)));
    if constexpr (sizeof(T) == 4) return static_cast<T>(__builtin_bswap32(static_cast<std::uint32_t>(value)));
    if constexpr (sizeof(T) == 8) return static_cast<T>(__builtin_bswap64(static_cast<std::uint64_t>(value)));
    return value;
}

// memcpy, because entries of a packed record or of a byte buffer may lie at any address.
template <class T>
T load(const std::byte* at) noexcept {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// Calls use(i, value) for `count` entries from `at` on. The native contiguous case is its own loop, because a stride
// known to the compiler is what lets it vectorise.
template <class T, class Use>
void for_entries(const Column& column, const std::byte* at, std::size_t count, Use use) {
    const std::ptrdiff_t stride = column.stride;
    if (column.swapped) {
        for (std::size_t i = 0; i < count; ++i, at += stride) use(i, swap_bytes(load<T>(at)));
    } else if (stride == static_cast<std::ptrdiff_t>(sizeof(T))) {
        for (std::size_t i = 0; i < count; ++i) use(i, load<T>(at + i * sizeof(T)));
    } else {
        for (std::size_t i = 0; i < count; ++i, at += stride) use(i, load<T>(at));
    }
}

// The address of an entry. Not computed for empty pieces, whose address may lie outside the array.
const std::byte* address(const Column& column, std::size_t first) noexcept {
    return column.data + static_cast<std::ptrdiff_t>(first) * column.stride;
}

template <class T>
void convert(const Column& column, std::size_t first, std::size_t count, std::int64_t* values) {
    std::int64_t sign = 0;
    for_entries<T>(column, address(column, first), count, [&](std::size_t i, T value) {
        values[i] = static_cast<std::int64_t>(value);
        if constexpr (std::is_same_v<T, std::uint64_t>) sign |= values[i];
    });
    if (sign >= 0) return;
    for (std::size_t i = 0; i < count; ++i) {
        if (values[i] >= 0) continue;
        throw std::domain_error(std::string(column.name) + "[" + std::to_string(column.origin + first + i) + "] is " +
                                std::to_string(static_cast<std::uint64_t>(values[i])) +
                                "; the largest value allowed is " +
                                std::to_string(std::numeric_limits<std::int64_t>::max()));
    }
}

template <class T>
void test(const Column& column, std::size_t first, std::size_t count, std::uint8_t* flags) {
    // Zero is zero in both byte orders, so nothing is swapped here.
    Column native = column;
    native.swapped = false;
    for_entries<T>(native, address(column, first), count,
                   [&](std::size_t i, T value) { flags[i] = static_cast<std::uint8_t>(value != 0); });
}

template <class T>
const T* entries(const Column& column, bool right_type) noexcept {
    const bool contiguous = column.stride == static_cast<std::ptrdiff_t>(sizeof(T)) || column.size <= 1;
    if (!right_type || column.read || column.swapped || !contiguous) return nullptr;
    if (reinterpret_cast<std::uintptr_t>(column.data) % alignof(T) != 0) return nullptr;
    return reinterpret_cast<const T*>(column.data);
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

void load_steps(const Column& column, std::size_t first, std::size_t count, std::int64_t* values) {
    if (count == 0) return;
    if (column.read) {
        if (column.read(column.source, first, count, values) < 0) throw ReadFailed{};
        return;
    }
    switch (column.element) {
        case Element::i8:
            return convert<std::int8_t>(column, first, count, values);
        case Element::i16:
            return convert<std::int16_t>(column, first, count, values);
        case Element::i32:
            return convert<std::int32_t>(column, first, count, values);
        case Element::i64:
            return convert<std::int64_t>(column, first, count, values);
        case Element::u8:
            return convert<std::uint8_t>(column, first, count, values);
        case Element::u16:
            return convert<std::uint16_t>(column, first, count, values);
        case Element::u32:
            return convert<std::uint32_t>(column, first, count, values);
        case Element::u64:
            return convert<std::uint64_t>(column, first, count, values);
    }
}

void load_flags(const Column& column, std::size_t first, std::size_t count, std::uint8_t* flags) {
    if (count == 0) return;
    if (column.read) {
        std::int64_t values[kBlock];
        if (column.read(column.source, first, count, values) < 0) throw ReadFailed{};
        for (std::size_t i = 0; i < count; ++i) flags[i] = static_cast<std::uint8_t>(values[i] != 0);
        return;
    }
    switch (item_size(column.element)) {
        case 1:
            return test<std::uint8_t>(column, first, count, flags);
        case 2:
            return test<std::uint16_t>(column, first, count, flags);
        case 4:
            return test<std::uint32_t>(column, first, count, flags);
        default:
            return test<std::uint64_t>(column, first, count, flags);
    }
}

const std::int32_t* int32_entries(const Column& column) noexcept {
    return entries<std::int32_t>(column, column.element == Element::i32);
}

const std::int64_t* int64_entries(const Column& column) noexcept {
    return entries<std::int64_t>(column, column.element == Element::i64);
}

const std::uint8_t* byte_entries(const Column& column) noexcept {
    return entries<std::uint8_t>(column, item_size(column.element) == 1);
}

}  // namespace pystale
