#pragma once
// How every kernel sees an argument: a column of integers, in memory or behind a reader.
//
// The loops exist for contiguous, aligned, native int32 and int64 steps with one-byte masks; those are read where they
// lie. Everything else (other widths, strides, byte orders, readers) is converted kBlock entries at a time into a
// buffer on the stack, so that no kernel allocates and no loop exists twice.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace pystale {

enum class Element : std::uint8_t { i8, i16, i32, i64, u8, u16, u32, u64 };

// Writes entries [first, first + count) of `source` to `values`. A negative result means that it failed; the reason is
// kept by whoever supplied the reader.
using Reader = int (*)(void* source, std::size_t first, std::size_t count, std::int64_t* values);

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

// Converts entries [first, first + count) to int64. Throws std::domain_error, naming the entry, for a uint64 that int64
// cannot hold, and ReadFailed.
void load_steps(const Column& column, std::size_t first, std::size_t count, std::int64_t* values);

// Writes 1 for every non-zero entry of [first, first + count), count <= kBlock, and 0 for the others. Throws
// ReadFailed.
void load_flags(const Column& column, std::size_t first, std::size_t count, std::uint8_t* flags);

// The entries themselves, where they are contiguous, aligned and native; otherwise nullptr.
[[nodiscard]] const std::int32_t* int32_entries(const Column& column) noexcept;
[[nodiscard]] const std::int64_t* int64_entries(const Column& column) noexcept;
[[nodiscard]] const std::uint8_t* byte_entries(const Column& column) noexcept;

// Hands tokens to a loop in the form it was written for: `const int32_t*` or `const int64_t*` steps, and one mask byte
// per token (nullptr: no mask, every token counts).
class Blocks {
  public:
    Blocks(const Column& steps, const Column* mask) noexcept
        : steps_(steps),
          mask_(mask),
          narrow_(int32_entries(steps)),
          wide_(int64_entries(steps)),
          bytes_(mask ? byte_entries(*mask) : nullptr) {}

    // The most tokens one visit may take: all of them when nothing needs converting.
    [[nodiscard]] std::size_t longest() const noexcept {
        const bool in_place = (narrow_ || wide_) && (!mask_ || bytes_);
        return in_place ? static_cast<std::size_t>(PTRDIFF_MAX) : kBlock;
    }

    // Calls loop(steps, mask) for tokens [first, first + count); count <= longest().
    template <class Loop>
    decltype(auto) visit(std::size_t first, std::size_t count, Loop&& loop) {
        const std::uint8_t* mask = nullptr;
        if (bytes_) {
            mask = bytes_ + first;
        } else if (mask_) {
            load_flags(*mask_, first, count, flags_);
            mask = flags_;
        }
        if (narrow_) return std::forward<Loop>(loop)(narrow_ + first, mask);
        if (wide_) return std::forward<Loop>(loop)(wide_ + first, mask);
        load_steps(steps_, first, count, values_);
        return std::forward<Loop>(loop)(static_cast<const std::int64_t*>(values_), mask);
    }

  private:
    const Column& steps_;
    const Column* mask_;
    const std::int32_t* narrow_;
    const std::int64_t* wide_;
    const std::uint8_t* bytes_;
    std::int64_t values_[kBlock];
    std::uint8_t flags_[kBlock];
};

}  // namespace pystale
