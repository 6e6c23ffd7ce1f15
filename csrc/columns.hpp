#pragma once
// How every kernel sees an argument: a column of integers, in memory or behind a reader.
//
// The loops (loops.hpp) exist for steps of every width that lie side by side, aligned, in this machine's byte order,
// with one-byte masks; those are read where they lie. Everything else (strides, byte orders, wide masks, readers) is
// copied kBlock entries at a time into a block on the stack, so that no kernel allocates and no loop exists twice.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace pystale {

enum class Element : std::uint8_t { i8, i16, i32, i64, u8, u16, u32, u64 };

// Writes entries [first, first + count) of `source` to `values`, count >= 1, and returns 0; or, where it sees that they
// are all the same, writes the first only and returns kAllTheSame. A negative result means that it failed; the reason
// is kept by whoever supplied the reader.
using Reader = int (*)(void* source, std::size_t first, std::size_t count, std::int64_t* values);
inline constexpr int kAllTheSame = 1;

// Thrown when a Reader failed.
struct ReadFailed {};

struct Column {
    const char* name = "steps";       // as the caller calls it, for error messages
    std::size_t size = 0;             // entries
    const std::byte* data = nullptr;  // entry 0, unless there is a reader
    std::ptrdiff_t stride = 0;        // bytes from one entry to the next; 0 and negative are fine
    Element element = Element::i64;   // bool arrays count as u8
    bool swapped = false;             // bytes are in the other order than this machine's
    Reader read = nullptr;            // set when the entries are not in memory
    void* source = nullptr;           // first argument of `read`
    std::size_t origin = 0;           // position of entry 0 in the caller's array, for error messages
};

// Entries converted at a time. 1024 steps are 8 KiB: they stay in the first-level cache until the kernel reads them.
inline constexpr std::size_t kBlock = 1024;

[[nodiscard]] std::size_t item_size(Element element) noexcept;

// Where copied entries go; as wide as kBlock of the widest.
struct Block {
    alignas(64) std::byte bytes[kBlock * sizeof(std::int64_t)];
};

// Entries that lie side by side, aligned, in this machine's byte order.
struct Entries {
    const void* data;
    Element element;
};

// Entries [first, first + count) as the loops read them: where they lie, or copied to `block`, then 1 <= count <=
// kBlock. With `one`, a reader's entries that are all the same may stay a single one, and *one says so. uint64 become
// int64: throws std::domain_error, naming the entry, for one that int64 cannot hold. Throws ReadFailed.
[[nodiscard]] Entries load_entries(const Column& column, std::size_t first, std::size_t count, Block& block,
                                   bool* one = nullptr);

// Converts entries [first, first + count), count <= kBlock, to int64. Throws what load_entries throws.
void load_steps(const Column& column, std::size_t first, std::size_t count, std::int64_t* values);

// Writes 1 for every non-zero entry of [first, first + count), count <= kBlock, and 0 for the others. Throws
// ReadFailed.
void load_flags(const Column& column, std::size_t first, std::size_t count, std::uint8_t* flags);

// Whether load_entries copies nothing.
[[nodiscard]] bool is_readable(const Column& column) noexcept;

// The entries themselves, where they are contiguous single bytes; otherwise nullptr.
[[nodiscard]] const std::uint8_t* byte_entries(const Column& column) noexcept;

// Hands tokens to a loop in the form it was written for: Entries of steps, and one mask byte per token (nullptr: no
// mask, every token counts).
class Blocks {
  public:
    Blocks(const Column& steps, const Column* mask) noexcept
        : steps_(steps), mask_(mask), bytes_(mask ? byte_entries(*mask) : nullptr) {}

    // The most tokens one visit may take: all of them when nothing needs copying or, for uint64, checking.
    [[nodiscard]] std::size_t longest() const noexcept {
        const bool in_place = is_readable(steps_) && steps_.element != Element::u64 && (!mask_ || bytes_);
        return in_place ? static_cast<std::size_t>(PTRDIFF_MAX) : kBlock;
    }

    // Calls loop(steps, mask, count) for tokens [first, first + count); 1 <= count <= longest().
    template <class Loop>
    decltype(auto) visit(std::size_t first, std::size_t count, Loop&& loop) {
        const std::uint8_t* const mask = flags(first, count);
        return std::forward<Loop>(loop)(load_entries(steps_, first, count, block_), mask, count);
    }

    // The same for a question that repeating a token does not change: where a list repeats one object, the loop is
    // called for one token.
    template <class Loop>
    decltype(auto) visit_distinct(std::size_t first, std::size_t count, Loop&& loop) {
        if (mask_) return visit(first, count, std::forward<Loop>(loop));
        bool one = false;
        const Entries entries = load_entries(steps_, first, count, block_, &one);
        return std::forward<Loop>(loop)(entries, nullptr, one ? std::size_t{1} : count);
    }

  private:
    const std::uint8_t* flags(std::size_t first, std::size_t count) {
        if (bytes_) return bytes_ + first;
        if (!mask_) return nullptr;
        load_flags(*mask_, first, count, flags_);
        return flags_;
    }

    const Column& steps_;
    const Column* mask_;
    const std::uint8_t* bytes_;
    Block block_;
    std::uint8_t flags_[kBlock];
};

}  // namespace pystale
