#include "loops.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "multiversion.hpp"

#if defined(PYSTALE_MULTIVERSION)
#include <immintrin.h>
#endif

// Everything that a clone calls must be inlined into it, or it would run at the baseline. MSVC makes no clones.
#if defined(_MSC_VER) && !defined(__clang__)
#include <stdlib.h>
#define PYSTALE_INLINE
#define PYSTALE_SWAP16 _byteswap_ushort
#define PYSTALE_SWAP32 _byteswap_ulong
#define PYSTALE_SWAP64 _byteswap_uint64
#else
#define PYSTALE_INLINE __attribute__((always_inline))
#define PYSTALE_SWAP16 __builtin_bswap16
#define PYSTALE_SWAP32 __builtin_bswap32
#define PYSTALE_SWAP64 __builtin_bswap64
#endif

namespace pystale::loops {
namespace {

// The one place where the type of an entry becomes a type of C++. uint64 is read as int64: steps that do not fit were
// refused before, and a mask only asks for zero.
template <class Use>
PYSTALE_INLINE inline decltype(auto) typed(Entries entries, Use use) {
    switch (entries.element) {
        case Element::i8:
            return use(static_cast<const std::int8_t*>(entries.data));
        case Element::i16:
            return use(static_cast<const std::int16_t*>(entries.data));
        case Element::i32:
            return use(static_cast<const std::int32_t*>(entries.data));
        case Element::u8:
            return use(static_cast<const std::uint8_t*>(entries.data));
        case Element::u16:
            return use(static_cast<const std::uint16_t*>(entries.data));
        case Element::u32:
            return use(static_cast<const std::uint32_t*>(entries.data));
        case Element::i64:
        case Element::u64:
            break;
    }
    return use(static_cast<const std::int64_t*>(entries.data));
}

// Whether a step of this type can reach the cutoff at all.
template <class Step>
PYSTALE_INLINE inline bool reaches(std::int64_t cutoff) noexcept {
    return cutoff <= static_cast<std::int64_t>(std::numeric_limits<Step>::max());
}

// The same entry may be read and written (in-place masks), never a different one: without ivdep the run-time alias
// check sends in-place calls to the scalar loop. min instead of != 0, which costs the vectorised loop one operation
// more.
template <class Step>
PYSTALE_INLINE inline void fill_loop(const Step* steps, const std::uint8_t* mask, std::size_t count, Step cutoff,
                                     std::uint8_t* out) noexcept {
    if (mask) {
#pragma GCC ivdep
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint8_t flag = std::min<std::uint8_t>(mask[i], 1);
            out[i] = steps[i] >= cutoff ? flag : std::uint8_t{0};
        }
    } else {
#pragma GCC ivdep
        for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<std::uint8_t>(steps[i] >= cutoff);
    }
}

template <class Step>
PYSTALE_INLINE inline bool any_loop(const Step* steps, const std::uint8_t* mask, std::size_t count,
                                    Step cutoff) noexcept {
    std::uint8_t found = 0;
    if (mask) {
        for (std::size_t i = 0; i < count; ++i)
            found |= static_cast<std::uint8_t>((steps[i] >= cutoff) & (mask[i] != 0));
    } else {
        for (std::size_t i = 0; i < count; ++i) found |= static_cast<std::uint8_t>(steps[i] >= cutoff);
    }
    return found != 0;
}

// Negative steps are the largest unsigned numbers, so the unsigned minimum is the oldest model step if there is one,
// and negative otherwise.
template <class Step>
PYSTALE_INLINE inline std::int64_t oldest_loop(const Step* steps, std::size_t count) noexcept {
    using Unsigned = std::make_unsigned_t<Step>;
    Unsigned oldest = std::numeric_limits<Unsigned>::max();
    for (std::size_t i = 0; i < count; ++i) oldest = std::min(oldest, static_cast<Unsigned>(steps[i]));
    return static_cast<std::int64_t>(static_cast<Step>(oldest));
}

// Bit masks instead of conditions: a masked maximum written with ?: does not vectorise on g++ 12. Counts are kept in
// the width of a lane, so that all lanes are equally wide.
template <class Step>
PYSTALE_INLINE inline Summary summary_loop(const Step* steps, const std::uint8_t* mask, std::size_t count) noexcept {
    using Lane = std::conditional_t < std::numeric_limits<Step>::digits<32, std::int32_t, std::int64_t>;
    using Unsigned = std::make_unsigned_t<Lane>;
    Unsigned oldest = std::numeric_limits<Unsigned>::max();
    Lane newest = -1;
    Lane trainable = 0;
    Lane model = 0;
    if (mask) {
        for (std::size_t i = 0; i < count; ++i) {
            const Lane step = steps[i];
            const Lane masked = static_cast<Lane>(-static_cast<Lane>(mask[i] == 0));
            oldest = std::min(oldest, static_cast<Unsigned>(step));
            newest = std::max(newest, step | masked);
            model += static_cast<Lane>(step >= 0);
            trainable += static_cast<Lane>((step | masked) >= 0);
        }
    } else {
        for (std::size_t i = 0; i < count; ++i) {
            const Lane step = steps[i];
            oldest = std::min(oldest, static_cast<Unsigned>(step));
            newest = std::max(newest, step);
            model += static_cast<Lane>(step >= 0);
        }
        trainable = model;
    }
    Summary summary;
    summary.oldest = std::max<std::int64_t>(static_cast<Lane>(oldest), -1);
    summary.newest_trainable = newest;
    summary.trainable = static_cast<std::size_t>(trainable);
    summary.model = static_cast<std::size_t>(model);
    return summary;
}

template <class T, bool swapped>
PYSTALE_INLINE inline T load(const std::byte* at) noexcept {
    T value;
    std::memcpy(&value, at, sizeof value);
    if constexpr (swapped && sizeof(T) == 2) value = static_cast<T>(PYSTALE_SWAP16(value));
    if constexpr (swapped && sizeof(T) == 4) value = static_cast<T>(PYSTALE_SWAP32(value));
    if constexpr (swapped && sizeof(T) == 8) value = static_cast<T>(PYSTALE_SWAP64(value));
    return value;
}

// A stride known to the compiler is what lets it vectorise: side by side, every other entry (a column of pairs, the low
// halves of wider numbers), and backwards.
template <class T, bool swapped>
PYSTALE_INLINE inline void gather_loop(const std::byte* at, std::ptrdiff_t stride, std::size_t count,
                                       T* block) noexcept {
    constexpr auto kSize = static_cast<std::ptrdiff_t>(sizeof(T));
    const auto entries = static_cast<std::ptrdiff_t>(count);
    if (stride == kSize) {
        for (std::ptrdiff_t i = 0; i < entries; ++i) block[i] = load<T, swapped>(at + i * kSize);
    } else if (stride == 2 * kSize) {
        for (std::ptrdiff_t i = 0; i < entries; ++i) block[i] = load<T, swapped>(at + i * 2 * kSize);
    } else if (stride == -kSize) {
        for (std::ptrdiff_t i = 0; i < entries; ++i) block[i] = load<T, swapped>(at - i * kSize);
    } else {
#pragma GCC unroll 8
        for (std::ptrdiff_t i = 0; i < entries; ++i) block[i] = load<T, swapped>(at + i * stride);
    }
}

// What fill does by hand, before fill_loop does the rest. g++ 12 narrows comparisons of wide steps to bytes in twice
// the operations that are needed (it cannot know that they are all ones or all zeros), a third of the time of the loop.
#if defined(PYSTALE_MULTIVERSION)
#define PYSTALE_AVX2 __attribute__((target("avx2")))

// Four (eight) comparisons as one vector of bytes, -1 where steps[i] > below. Packing works within each half of a
// vector, so that the groups have to be put back in order at the end.
PYSTALE_AVX2 inline __m256i above(const std::int32_t* steps, __m256i below) noexcept {
    const auto* const at = reinterpret_cast<const __m256i*>(steps);
    const __m256i low = _mm256_packs_epi32(_mm256_cmpgt_epi32(_mm256_loadu_si256(at), below),
                                           _mm256_cmpgt_epi32(_mm256_loadu_si256(at + 1), below));
    const __m256i high = _mm256_packs_epi32(_mm256_cmpgt_epi32(_mm256_loadu_si256(at + 2), below),
                                            _mm256_cmpgt_epi32(_mm256_loadu_si256(at + 3), below));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
}

PYSTALE_AVX2 inline __m256i above(const std::int64_t* steps, __m256i below) noexcept {
    const auto* const at = reinterpret_cast<const __m256i*>(steps);
    __m256i pairs[4];
    for (int i = 0; i < 4; ++i) {
        pairs[i] = _mm256_packs_epi32(_mm256_cmpgt_epi64(_mm256_loadu_si256(at + 2 * i), below),
                                      _mm256_cmpgt_epi64(_mm256_loadu_si256(at + 2 * i + 1), below));
    }
    const __m256i packed =
        _mm256_packs_epi16(_mm256_packs_epi32(pairs[0], pairs[1]), _mm256_packs_epi32(pairs[2], pairs[3]));
    const __m256i halves = _mm256_permute4x64_epi64(packed, 0b11011000);
    const __m256i order = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15,  //
                                           0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm256_shuffle_epi8(halves, order);
}

// The first entries, in groups of 32; returns how many.
template <class Step>
PYSTALE_AVX2 std::size_t fill_vectors(const Step* steps, const std::uint8_t* mask, std::size_t count, Step cutoff,
                                      std::uint8_t* out) noexcept {
    // cutoff >= 0, so one less does not wrap around.
    const __m256i below =
        sizeof(Step) == 4 ? _mm256_set1_epi32(static_cast<std::int32_t>(cutoff - 1)) : _mm256_set1_epi64x(cutoff - 1);
    const __m256i ones = _mm256_set1_epi8(1);
    std::size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        __m256i flags = ones;
        if (mask) flags = _mm256_min_epu8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(mask + i)), ones);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_and_si256(above(steps + i, below), flags));
    }
    return i;
}
#endif

// Which clone the dynamic linker picks is told by a function it picks in the same way. In this file only: a caller that
// sees one declaration calls the baseline.
#if defined(PYSTALE_MULTIVERSION)
__attribute__((target("arch=x86-64-v4"))) const char* level_here() noexcept { return "x86-64-v4"; }
__attribute__((target("arch=x86-64-v3"))) const char* level_here() noexcept { return "x86-64-v3"; }
__attribute__((target("default"))) const char* level_here() noexcept { return "baseline"; }
#else
const char* level_here() noexcept { return "baseline"; }
#endif

template <class Pointer>
using Pointee = std::remove_cv_t<std::remove_pointer_t<Pointer>>;

}  // namespace

PYSTALE_MULTIVERSION_CLONES void fill(Entries steps, const std::uint8_t* mask, std::size_t count, std::int64_t cutoff,
                                      std::uint8_t* out) noexcept {
    typed(steps, [=](auto* values) PYSTALE_INLINE {
        using Step = Pointee<decltype(values)>;
        if (!reaches<Step>(cutoff)) {
            std::fill_n(out, count, std::uint8_t{0});
            return;
        }
        std::size_t done = 0;
#if defined(PYSTALE_MULTIVERSION)
        if constexpr (std::is_signed_v<Step> && sizeof(Step) >= 4) {
            if (__builtin_cpu_supports("avx2"))
                done = fill_vectors(values, mask, count, static_cast<Step>(cutoff), out);
        }
#endif
        fill_loop(values + done, mask ? mask + done : nullptr, count - done, static_cast<Step>(cutoff), out + done);
    });
}

PYSTALE_MULTIVERSION_CLONES bool any(Entries steps, const std::uint8_t* mask, std::size_t count,
                                     std::int64_t cutoff) noexcept {
    return typed(steps, [=](auto* values) PYSTALE_INLINE {
        using Step = Pointee<decltype(values)>;
        return reaches<Step>(cutoff) && any_loop(values, mask, count, static_cast<Step>(cutoff));
    });
}

PYSTALE_MULTIVERSION_CLONES std::int64_t oldest(Entries steps, std::size_t count) noexcept {
    return typed(steps, [=](auto* values) PYSTALE_INLINE { return oldest_loop(values, count); });
}

PYSTALE_MULTIVERSION_CLONES Summary summary(Entries steps, const std::uint8_t* mask, std::size_t count) noexcept {
    return typed(steps, [=](auto* values) PYSTALE_INLINE { return summary_loop(values, mask, count); });
}

PYSTALE_MULTIVERSION_CLONES void test(Entries entries, std::size_t count, std::uint8_t* flags) noexcept {
    typed(entries, [=](auto* values) PYSTALE_INLINE {
#pragma GCC ivdep
        for (std::size_t i = 0; i < count; ++i) flags[i] = static_cast<std::uint8_t>(values[i] != 0);
    });
}

PYSTALE_MULTIVERSION_CLONES std::size_t count_flags(const std::uint8_t* mask, std::size_t count) noexcept {
    std::size_t ones = 0;
    for (std::size_t i = 0; i < count; ++i) ones += static_cast<std::size_t>(mask[i] != 0);
    return ones;
}

PYSTALE_MULTIVERSION_CLONES void widen(Entries entries, std::size_t count, std::int64_t* values) noexcept {
    typed(entries, [=](auto* narrow) PYSTALE_INLINE {
        for (std::size_t i = 0; i < count; ++i) values[i] = narrow[i];
    });
}

PYSTALE_MULTIVERSION_CLONES bool past_int64(const std::uint64_t* entries, std::size_t count) noexcept {
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < count; ++i) bits |= entries[i];
    return bits >> 63 != 0;
}

PYSTALE_MULTIVERSION_CLONES void gather(const std::byte* at, std::ptrdiff_t stride, std::size_t item_size, bool swapped,
                                        std::size_t count, std::byte* block) noexcept {
    const auto as = [=](auto type) PYSTALE_INLINE {
        using T = decltype(type);
        auto* const values = reinterpret_cast<T*>(block);
        swapped ? gather_loop<T, true>(at, stride, count, values) : gather_loop<T, false>(at, stride, count, values);
    };
    switch (item_size) {
        case 1:
            return gather_loop<std::uint8_t, false>(at, stride, count, reinterpret_cast<std::uint8_t*>(block));
        case 2:
            return as(std::uint16_t{});
        case 4:
            return as(std::uint32_t{});
        default:
            return as(std::uint64_t{});
    }
}

PYSTALE_MULTIVERSION_CLONES void spread(const std::uint8_t* flags, std::size_t count, std::size_t item_size,
                                        std::uint64_t one, std::byte* out) noexcept {
    const auto as = [=](auto type) PYSTALE_INLINE {
        using T = decltype(type);
        for (std::size_t i = 0; i < count; ++i) {
            const auto value = static_cast<T>(static_cast<T>(-static_cast<T>(flags[i])) & static_cast<T>(one));
            std::memcpy(out + i * sizeof(T), &value, sizeof value);
        }
    };
    switch (item_size) {
        case 1:
            return as(std::uint8_t{});
        case 2:
            return as(std::uint16_t{});
        case 4:
            return as(std::uint32_t{});
        default:
            return as(std::uint64_t{});
    }
}

// Thirty-two at a time, since runs are long; a loop that could stop at each word would not vectorise.
PYSTALE_MULTIVERSION_CLONES std::size_t same_words(const std::uintptr_t* words, std::size_t count) noexcept {
    constexpr std::size_t kStride = 32;
    const std::uintptr_t first = words[0];
    std::size_t same = 1;
    for (; same + kStride <= count; same += kStride) {
        std::uintptr_t difference = 0;
        for (std::size_t i = 0; i < kStride; ++i) difference |= words[same + i] ^ first;
        if (difference != 0) break;
    }
    while (same < count && words[same] == first) ++same;
    return same;
}

PYSTALE_MULTIVERSION_CLONES void repeat(std::int64_t value, std::size_t count, std::int64_t* out) noexcept {
    for (std::size_t i = 0; i < count; ++i) out[i] = value;
}

const char* level() noexcept { return level_here(); }

}  // namespace pystale::loops
