#include "pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace poise {
namespace {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr auto SPIN = std::chrono::microseconds(30);
constexpr auto YIELD = std::chrono::microseconds(500);

template <class Done> void wait_for(std::atomic<uint32_t>& value, Done done) {
    const auto begin = std::chrono::steady_clock::now();
    for (;;) {
        for (int i = 0; i < 64; i++) {
            if (done(value.load(std::memory_order_acquire))) return;
            pause();
        }
        const auto waited = std::chrono::steady_clock::now() - begin;
        if (waited < SPIN) continue;
        if (waited < YIELD) {
            std::this_thread::yield();
            continue;
        }
        const uint32_t seen = value.load(std::memory_order_acquire);
        if (!done(seen)) value.wait(seen, std::memory_order_acquire);
    }
}

}  // namespace

FlushDenormals::FlushDenormals() {
#if defined(__x86_64__)
    saved_ = _mm_getcsr();
    _mm_setcsr((unsigned)saved_ | 0x8040);
#elif defined(__aarch64__)
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | (1ull << 24)));
#else
#error "FTZ and DAZ are part of the numerics contract: say here how this processor turns them on"
#endif
}

FlushDenormals::~FlushDenormals() {
#if defined(__x86_64__)
    _mm_setcsr((unsigned)saved_);
#elif defined(__aarch64__)
    asm volatile("msr fpcr, %0" : : "r"(saved_));
#endif
}

Pool::Pool(int threads) : size_(threads < 1 ? 1 : threads) {
    for (int worker = 1; worker < size_; worker++) workers_.emplace_back([this, worker] { work(worker); });
}

Pool::~Pool() {
    stop_ = true;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (auto& thread : workers_) thread.join();
}

void Pool::work(int worker) {
    FlushDenormals flush;
    uint32_t seen = 0;
    for (;;) {
        wait_for(epoch_, [seen](uint32_t now) { return now != seen; });
        seen++;
        if (stop_) return;
        task_(argument_, worker);
        barrier();
    }
}

void Pool::run(void (*task)(void*, int), void* argument) {
    FlushDenormals flush;
    if (size_ > 1) {
        task_ = task;
        argument_ = argument;
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
    }
    task(argument, 0);
    barrier();
}

void Pool::barrier() {
    if (size_ == 1) return;
    const uint32_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        arrived_.store(0, std::memory_order_relaxed);
        generation_.fetch_add(1, std::memory_order_release);
        generation_.notify_all();
        return;
    }
    wait_for(generation_, [generation](uint32_t now) { return now != generation; });
}

void Pool::wait_until(std::atomic<uint32_t>& value, uint32_t target) {
    wait_for(value, [target](uint32_t now) { return now == target; });
}

}  // namespace poise
