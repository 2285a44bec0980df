// Aligned memory for weights and pages, on huge pages where the system offers them; touched lazily.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace poise {

// One mapping of zeroed memory, 2 MiB aligned, without reserving it.
class Mapping {
  public:
    explicit Mapping(size_t bytes, bool huge_pages = true);
    ~Mapping();
    Mapping(Mapping&& other) noexcept;
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }
    // Has the system find and clear memory for a part now, not at its first write; changes no content. Does nothing where it can't.
    void populate(size_t offset, size_t bytes);

  private:
    void* base_ = nullptr;
    size_t mapped_ = 0;
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

// Hands out 64-byte aligned pieces that live as long as the arena.
class Arena {
  public:
    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    uint8_t* allocate(size_t bytes);
    size_t used() const { return used_; }

  private:
    std::vector<Mapping> chunks_;
    size_t left_ = 0, used_ = 0;
    uint8_t* next_ = nullptr;
};

}  // namespace poise
