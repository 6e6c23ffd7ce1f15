#include "runs.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace pystale {
namespace {

int read_runs(void* source, std::size_t first, std::size_t count, std::int64_t* values) {
    const Runs& runs = *static_cast<const Runs*>(source);
    std::size_t at = first;
    std::size_t run = runs.find(first);
    if (static_cast<std::size_t>(runs.runs()[run].end) >= first + count) {
        *values = runs.runs()[run].step;
        return kAllTheSame;
    }
    for (; at < first + count; ++run) {
        const auto end = std::min(static_cast<std::size_t>(runs.runs()[run].end), first + count);
        values = std::fill_n(values, end - at, runs.runs()[run].step);
        at = end;
    }
    return 0;
}

void set(std::size_t count, std::uint8_t* out, std::ptrdiff_t stride, std::uint8_t value) noexcept {
    if (stride == 1) {
        std::memset(out, value, count);
    } else {
        for (std::size_t i = 0; i < count; ++i) out[static_cast<std::ptrdiff_t>(i) * stride] = value;
    }
}

}  // namespace

void Runs::append(std::int64_t step, std::size_t count) {
    if (count == 0) return;
    const std::size_t before = size();
    if (count > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max()) - before) {
        throw std::invalid_argument("model steps of more than 2**63 - 1 tokens");
    }
    const auto end = static_cast<std::int64_t>(before + count);
    if (!runs_.empty() && runs_.back().step == step) {
        runs_.back().end = end;
    } else {
        runs_.push_back({step, end});
    }
}

void Runs::append(const Runs& other) {
    if (other.runs_.empty()) return;
    Runs longer;
    longer.runs_.reserve(runs_.size() + other.runs_.size());
    longer.runs_ = runs_;
    std::int64_t start = 0;
    for (const Run& run : other.runs_) {
        longer.append(run.step, static_cast<std::size_t>(run.end - start));
        start = run.end;
    }
    runs_ = std::move(longer.runs_);
}

std::size_t Runs::find(std::size_t at) const noexcept {
    const auto token = static_cast<std::int64_t>(at);
    const auto found = std::upper_bound(runs_.begin(), runs_.end(), token,
                                        [](std::int64_t value, const Run& run) { return value < run.end; });
    return static_cast<std::size_t>(found - runs_.begin());
}

Runs Runs::slice(std::size_t start, std::ptrdiff_t stride, std::size_t count) const {
    Runs picked;
    if (count == 0) return picked;
    const bool forwards = stride > 0;
    // Unsigned negation, so that the most negative stride has a distance too.
    const std::size_t distance =
        forwards ? static_cast<std::size_t>(stride) : std::size_t{0} - static_cast<std::size_t>(stride);
    std::size_t at = start;
    for (std::size_t run = find(start); count > 0;) {
        const std::size_t first = run == 0 ? 0 : static_cast<std::size_t>(runs_[run - 1].end);
        const auto end = static_cast<std::size_t>(runs_[run].end);
        // Tokens of this run beyond `at`, in the direction of the slice.
        const std::size_t beyond = forwards ? end - 1 - at : at - first;
        const std::size_t here = std::min(count, beyond / distance + 1);
        picked.append(runs_[run].step, here);
        count -= here;
        if (count == 0) break;
        at = forwards ? at + here * distance : at - here * distance;
        // A long stride may jump over many runs.
        run = find(at);
    }
    return picked;
}

Runs encode(const Column& steps) {
    Runs runs;
    std::int64_t values[kBlock];
    for (std::size_t first = 0; first < steps.size; first += kBlock) {
        const std::size_t count = std::min(kBlock, steps.size - first);
        load_steps(steps, first, count, values);
        for (std::size_t start = 0; start < count;) {
            std::size_t end = start + 1;
            while (end < count && values[end] == values[start]) ++end;
            runs.append(values[start], end - start);
            start = end;
        }
    }
    return runs;
}

void decode(const Runs& runs, std::int64_t* steps) noexcept {
    std::int64_t start = 0;
    for (const Run& run : runs.runs()) {
        std::fill(steps + start, steps + run.end, run.step);
        start = run.end;
    }
}

Column as_column(const Runs& runs) noexcept {
    Column column;
    column.size = runs.size();
    column.read = read_runs;
    column.source = const_cast<Runs*>(&runs);  // read_runs only reads
    return column;
}

std::int64_t oldest_step(const Runs& steps) noexcept {
    std::int64_t oldest = -1;
    for (const Run& run : steps.runs()) {
        if (run.step >= 0) oldest = oldest < 0 ? run.step : std::min(oldest, run.step);
    }
    return oldest;
}

bool has_trainable(const Runs& steps, const Column* mask, std::int64_t cutoff) {
    const std::span<const Run> runs = steps.runs();
    for (std::size_t run = runs.size(); run-- > 0;) {
        if (runs[run].step < cutoff) continue;
        const std::int64_t start = run == 0 ? 0 : runs[run - 1].end;
        if (!mask) return true;
        if (has_flag(*mask, static_cast<std::size_t>(start), static_cast<std::size_t>(runs[run].end - start))) {
            return true;
        }
    }
    return false;
}

void fill_mask(const Runs& steps, const Column* mask, std::int64_t cutoff, std::uint8_t* out, std::ptrdiff_t stride) {
    std::int64_t start = 0;
    for (const Run& run : steps.runs()) {
        const auto count = static_cast<std::size_t>(run.end - start);
        std::uint8_t* const here = out + start * stride;
        if (run.step < cutoff || !mask) {
            set(count, here, stride, run.step >= cutoff);
        } else {
            copy_flags(*mask, static_cast<std::size_t>(start), count, here, stride);
        }
        start = run.end;
    }
}

Summary summarise(const Runs& steps, const Column* mask, std::size_t first, std::size_t count) {
    Summary summary;
    const std::size_t end = first + count;
    const std::span<const Run> runs = steps.runs();
    for (std::size_t run = steps.find(first); first < end; ++run) {
        const std::size_t stop = std::min(static_cast<std::size_t>(runs[run].end), end);
        const std::int64_t step = runs[run].step;
        if (step >= 0) {
            const std::size_t trainable = mask ? count_flags(*mask, first, stop - first) : stop - first;
            summary.add({step, trainable > 0 ? step : -1, trainable, stop - first});
        }
        first = stop;
    }
    return summary;
}

}  // namespace pystale
