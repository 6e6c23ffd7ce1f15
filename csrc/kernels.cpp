#include "kernels.hpp"

#include <stdexcept>
#include <string>
#include <type_traits>

#include "multiversion.hpp"

namespace pystale {
namespace {

// The loops, once. They must be inlined into the clones below, or they would run at the baseline.
#define PYSTALE_INLINE inline __attribute__((always_inline))

// The same entry may be read and written (in-place masks), never a different one: without ivdep the run-time alias
// check sends in-place calls to the scalar loop.
template <class Step>
PYSTALE_INLINE void fill_loop(const Step* steps, const std::uint8_t* mask, std::size_t count, Step cutoff,
                              std::uint8_t* out) noexcept {
    if (mask) {
#pragma GCC ivdep
        for (std::size_t i = 0; i < count; ++i)
            out[i] = static_cast<std::uint8_t>((steps[i] >= cutoff) & (mask[i] != 0));
    } else {
#pragma GCC ivdep
        for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<std::uint8_t>(steps[i] >= cutoff);
    }
}

// No early exit inside: a loop that can leave early does not vectorise.
template <class Step>
PYSTALE_INLINE bool any_loop(const Step* steps, const std::uint8_t* mask, std::size_t count, Step cutoff) noexcept {
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
PYSTALE_INLINE Step oldest_loop(const Step* steps, std::size_t count) noexcept {
    using Unsigned = std::make_unsigned_t<Step>;
    Unsigned oldest = std::numeric_limits<Unsigned>::max();
    for (std::size_t i = 0; i < count; ++i) oldest = std::min(oldest, static_cast<Unsigned>(steps[i]));
    return static_cast<Step>(oldest);
}

// Bit masks instead of conditions: a masked maximum written with ?: does not vectorise on g++ 12. Counts are kept in
// the width of a step, so that all lanes are equally wide; count < 2**31.
template <class Step>
PYSTALE_INLINE Summary summary_loop(const Step* steps, const std::uint8_t* mask, std::size_t count) noexcept {
    using Unsigned = std::make_unsigned_t<Step>;
    Unsigned oldest = std::numeric_limits<Unsigned>::max();
    Step newest = -1;
    Step trainable = 0;
    Step model = 0;
    if (mask) {
        for (std::size_t i = 0; i < count; ++i) {
            const Step step = steps[i];
            const Step masked = static_cast<Step>(-static_cast<Step>(mask[i] == 0));
            oldest = std::min(oldest, static_cast<Unsigned>(step));
            newest = std::max(newest, static_cast<Step>(step | masked));
            model = static_cast<Step>(model + static_cast<Step>(step >= 0));
            trainable = static_cast<Step>(trainable + static_cast<Step>((step | masked) >= 0));
        }
    } else {
        for (std::size_t i = 0; i < count; ++i) {
            oldest = std::min(oldest, static_cast<Unsigned>(steps[i]));
            newest = std::max(newest, steps[i]);
            model = static_cast<Step>(model + static_cast<Step>(steps[i] >= 0));
        }
        trainable = model;
    }
    Summary summary;
    summary.oldest = std::max<std::int64_t>(static_cast<Step>(oldest), -1);
    summary.newest_trainable = newest;
    summary.trainable = static_cast<std::size_t>(trainable);
    summary.model = static_cast<std::size_t>(model);
    return summary;
}

}  // namespace

namespace loops {

PYSTALE_MULTIVERSION_CLONES void fill(const std::int32_t* steps, const std::uint8_t* mask, std::size_t count,
                                      std::int32_t cutoff, std::uint8_t* out) noexcept {
    fill_loop(steps, mask, count, cutoff, out);
}

PYSTALE_MULTIVERSION_CLONES void fill(const std::int64_t* steps, const std::uint8_t* mask, std::size_t count,
                                      std::int64_t cutoff, std::uint8_t* out) noexcept {
    fill_loop(steps, mask, count, cutoff, out);
}

PYSTALE_MULTIVERSION_CLONES bool any(const std::int32_t* steps, const std::uint8_t* mask, std::size_t count,
                                     std::int32_t cutoff) noexcept {
    return any_loop(steps, mask, count, cutoff);
}

PYSTALE_MULTIVERSION_CLONES bool any(const std::int64_t* steps, const std::uint8_t* mask, std::size_t count,
                                     std::int64_t cutoff) noexcept {
    return any_loop(steps, mask, count, cutoff);
}

PYSTALE_MULTIVERSION_CLONES std::int32_t oldest(const std::int32_t* steps, std::size_t count) noexcept {
    return oldest_loop(steps, count);
}

PYSTALE_MULTIVERSION_CLONES std::int64_t oldest(const std::int64_t* steps, std::size_t count) noexcept {
    return oldest_loop(steps, count);
}

PYSTALE_MULTIVERSION_CLONES Summary summary(const std::int32_t* steps, const std::uint8_t* mask,
                                            std::size_t count) noexcept {
    return summary_loop(steps, mask, count);
}

PYSTALE_MULTIVERSION_CLONES Summary summary(const std::int64_t* steps, const std::uint8_t* mask,
                                            std::size_t count) noexcept {
    return summary_loop(steps, mask, count);
}

PYSTALE_MULTIVERSION_CLONES void copy_flags(const std::uint8_t* mask, std::size_t count, std::uint8_t* out) noexcept {
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<std::uint8_t>(mask[i] != 0);
}

PYSTALE_MULTIVERSION_CLONES std::size_t count_flags(const std::uint8_t* mask, std::size_t count) noexcept {
    std::size_t ones = 0;
    for (std::size_t i = 0; i < count; ++i) ones += static_cast<std::size_t>(mask[i] != 0);
    return ones;
}

// Which clone the dynamic linker picks is told by a function it picks in the same way.
#if defined(PYSTALE_MULTIVERSION)
__attribute__((target("arch=x86-64-v4"))) const char* level() noexcept { return "x86-64-v4"; }
__attribute__((target("arch=x86-64-v3"))) const char* level() noexcept { return "x86-64-v3"; }
__attribute__((target("default"))) const char* level() noexcept { return "baseline"; }
#else
const char* level() noexcept { return "baseline"; }
#endif

}  // namespace loops

namespace {

// Tokens looked at first and then at a time when searching from the tail. The first block is small, because the last
// tokens of a response are nearly always the fresh ones.
constexpr std::size_t kTail = 64;

void fill_block(const std::int64_t* steps, const std::uint8_t* mask, std::size_t count, std::int64_t cutoff,
                std::uint8_t* out) noexcept {
    loops::fill(steps, mask, count, cutoff, out);
}

// No int32 step reaches a cutoff that int32 cannot hold.
void fill_block(const std::int32_t* steps, const std::uint8_t* mask, std::size_t count, std::int64_t cutoff,
                std::uint8_t* out) noexcept {
    if (cutoff > std::numeric_limits<std::int32_t>::max()) {
        std::fill_n(out, count, std::uint8_t{0});
    } else {
        loops::fill(steps, mask, count, static_cast<std::int32_t>(cutoff), out);
    }
}

bool any_in_block(const std::int64_t* steps, const std::uint8_t* mask, std::size_t count,
                  std::int64_t cutoff) noexcept {
    return loops::any(steps, mask, count, cutoff);
}

bool any_in_block(const std::int32_t* steps, const std::uint8_t* mask, std::size_t count,
                  std::int64_t cutoff) noexcept {
    return cutoff <= std::numeric_limits<std::int32_t>::max() &&
           loops::any(steps, mask, count, static_cast<std::int32_t>(cutoff));
}

void scatter(const std::uint8_t* flags, std::size_t count, std::uint8_t* out, std::ptrdiff_t stride) noexcept {
    for (std::size_t i = 0; i < count; ++i) out[static_cast<std::ptrdiff_t>(i) * stride] = flags[i];
}

}  // namespace

std::int64_t oldest_step(const Column& steps) {
    Blocks blocks(steps, nullptr);
    std::int64_t oldest = -1;
    for (std::size_t first = 0; first < steps.size;) {
        const std::size_t count = std::min(blocks.longest(), steps.size - first);
        const std::int64_t here = blocks.visit(
            first, count,
            [&](const auto* values, const std::uint8_t*) -> std::int64_t { return loops::oldest(values, count); });
        if (here >= 0) oldest = oldest < 0 ? here : std::min(oldest, here);
        first += count;
    }
    return oldest;
}

bool has_trainable(const Column& steps, const Column* mask, std::int64_t cutoff) {
    Blocks blocks(steps, mask);
    std::size_t length = kTail;
    for (std::size_t end = steps.size; end > 0;) {
        const std::size_t count = std::min(length, end);
        end -= count;
        const bool found = blocks.visit(end, count, [&](const auto* values, const std::uint8_t* flags) {
            return any_in_block(values, flags, count, cutoff);
        });
        if (found) return true;
        length = kBlock;
    }
    return false;
}

void fill_mask(const Column& steps, const Column* mask, std::int64_t cutoff, std::uint8_t* out, std::ptrdiff_t stride) {
    Blocks blocks(steps, mask);
    std::uint8_t flags[kBlock];
    const std::size_t longest = stride == 1 ? blocks.longest() : kBlock;
    for (std::size_t first = 0; first < steps.size;) {
        const std::size_t count = std::min(longest, steps.size - first);
        std::uint8_t* const here = out + static_cast<std::ptrdiff_t>(first) * stride;
        blocks.visit(first, count, [&](const auto* values, const std::uint8_t* mask_bytes) {
            fill_block(values, mask_bytes, count, cutoff, stride == 1 ? here : flags);
        });
        if (stride != 1) scatter(flags, count, here, stride);
        first += count;
    }
}

Summary summarise(const Column& steps, const Column* mask, std::size_t first, std::size_t count) {
    // Keeps the counts of a block within int32.
    constexpr std::size_t kLongest = std::size_t{1} << 30;
    Blocks blocks(steps, mask);
    const std::size_t longest = std::min(blocks.longest(), kLongest);
    Summary summary;
    for (const std::size_t end = first + count; first < end;) {
        const std::size_t here = std::min(longest, end - first);
        summary.add(blocks.visit(first, here, [&](const auto* values, const std::uint8_t* flags) {
            return loops::summary(values, flags, here);
        }));
        first += here;
    }
    return summary;
}

std::size_t count_flags(const Column& mask, std::size_t first, std::size_t count) {
    if (const std::uint8_t* bytes = byte_entries(mask)) return loops::count_flags(bytes + first, count);
    std::uint8_t flags[kBlock];
    std::size_t ones = 0;
    for (const std::size_t end = first + count; first < end;) {
        const std::size_t here = std::min(kBlock, end - first);
        load_flags(mask, first, here, flags);
        ones += loops::count_flags(flags, here);
        first += here;
    }
    return ones;
}

bool has_flag(const Column& mask, std::size_t first, std::size_t count) {
    std::size_t length = kTail;
    while (count > 0) {
        const std::size_t here = std::min(length, count);
        count -= here;
        if (count_flags(mask, first + count, here) > 0) return true;
        length = kBlock;
    }
    return false;
}

void copy_flags(const Column& mask, std::size_t first, std::size_t count, std::uint8_t* out, std::ptrdiff_t stride) {
    const std::uint8_t* bytes = byte_entries(mask);
    if (bytes && stride == 1) return loops::copy_flags(bytes + first, count, out);
    std::uint8_t flags[kBlock];
    for (std::size_t done = 0; done < count;) {
        const std::size_t here = std::min(kBlock, count - done);
        load_flags(mask, first + done, here, flags);
        scatter(flags, here, out + static_cast<std::ptrdiff_t>(done) * stride, stride);
        done += here;
    }
}

const char* cpu_level() noexcept { return loops::level(); }

void check_offsets(const Column& offsets, std::size_t tokens) {
    if (offsets.size == 0) {
        throw std::invalid_argument("offsets is empty; n + 1 integers are required for n responses, the first being 0");
    }
    std::int64_t values[kBlock];
    std::int64_t before = 0;
    for (std::size_t first = 0; first < offsets.size; first += kBlock) {
        const std::size_t count = std::min(kBlock, offsets.size - first);
        load_steps(offsets, first, count, values);
        for (std::size_t i = 0; i < count; ++i) {
            const bool is_first = first + i == 0;
            if (values[i] < before || (is_first && values[i] != 0)) {
                throw std::invalid_argument(
                    "offsets[" + std::to_string(first + i) + "] is " + std::to_string(values[i]) +
                    (is_first ? "; the first offset must be 0"
                              : ", less than the " + std::to_string(before) + " before it; offsets must not decrease"));
            }
            before = values[i];
        }
    }
    if (static_cast<std::size_t>(before) != tokens) {
        throw std::invalid_argument("the last offset is " + std::to_string(before) + ", steps has " +
                                    std::to_string(tokens) + " entries; the two must be equal");
    }
}

}  // namespace pystale
