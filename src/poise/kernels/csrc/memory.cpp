#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace poise {

constexpr size_t HUGE_PAGE = 2u << 20;
constexpr size_t CHUNK = 32u << 20;

Mapping::Mapping(size_t bytes, bool huge_pages) : size_(bytes) {
    mapped_ = bytes + HUGE_PAGE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    data_ = (uint8_t*)(((uintptr_t)base_ + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
#ifdef MADV_HUGEPAGE
    madvise(data_, size_, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
}

void Mapping::populate(size_t offset, size_t bytes) {
#ifdef __linux__
    constexpr int POPULATE_WRITE = 23;  // MADV_POPULATE_WRITE, Linux 5.14
    const size_t begin = offset & ~(size_t)4095;
    if (offset + bytes <= size_) madvise(data_ + begin, offset + bytes - begin, POPULATE_WRITE);
#else
    (void)offset, (void)bytes;
#endif
}

Mapping::Mapping(Mapping&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), mapped_(other.mapped_), data_(other.data_), size_(other.size_) {}

Mapping::~Mapping() {
    if (base_) munmap(base_, mapped_);
}

uint8_t* Arena::allocate(size_t bytes) {
    bytes = (bytes + 63) & ~(size_t)63;
    if (bytes > left_) {
        chunks_.emplace_back(bytes > CHUNK ? bytes : CHUNK);
        next_ = chunks_.back().data();
        left_ = chunks_.back().size();
    }
    uint8_t* p = next_;
    next_ += bytes;
    left_ -= bytes;
    used_ += bytes;
    return p;
}

}  // namespace poise
