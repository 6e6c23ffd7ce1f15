#include "kernels.hpp"

#include <stdexcept>
#include <string>

#include "loops.hpp"

namespace pystale {
namespace {

// Tokens looked at first and then at a time when searching from the tail. The first block is small, because the last
// tokens of a response are nearly always the fresh ones.
constexpr std::size_t kTail = 64;

void scatter(const std::uint8_t* flags, std::size_t count, std::uint8_t* out, std::ptrdiff_t stride) noexcept {
    for (std::size_t i = 0; i < count; ++i) out[static_cast<std::ptrdiff_t>(i) * stride] = flags[i];
}

}  // namespace

std::int64_t oldest_step(const Column& steps) {
    Blocks blocks(steps, nullptr);
    std::int64_t oldest = -1;
    for (std::size_t first = 0; first < steps.size;) {
        const std::size_t count = std::min(blocks.longest(), steps.size - first);
        const std::int64_t here = blocks.visit_distinct(
            first, count,
            [](Entries values, const std::uint8_t*, std::size_t tokens) { return loops::oldest(values, tokens); });
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
        const bool found =
            blocks.visit_distinct(end, count, [=](Entries values, const std::uint8_t* flags, std::size_t tokens) {
                return loops::any(values, flags, tokens, cutoff);
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
        blocks.visit(first, count, [&](Entries values, const std::uint8_t* mask_bytes, std::size_t tokens) {
            loops::fill(values, mask_bytes, tokens, cutoff, stride == 1 ? here : flags);
        });
        if (stride != 1) scatter(flags, count, here, stride);
        first += count;
    }
}

Summary summarise(const Column& steps, const Column* mask, std::size_t first, std::size_t count) {
    Blocks blocks(steps, mask);
    const std::size_t longest = std::min(blocks.longest(), loops::kLongestSummary);
    Summary summary;
    for (const std::size_t end = first + count; first < end;) {
        const std::size_t here = std::min(longest, end - first);
        summary.add(blocks.visit(first, here, [](Entries values, const std::uint8_t* flags, std::size_t tokens) {
            return loops::summary(values, flags, tokens);
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
    if (bytes && stride == 1) return loops::test({bytes + first, Element::u8}, count, out);
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
