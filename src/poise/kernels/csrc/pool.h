// A pool of workers. Waits spin for 30 µs, then yield, then park, so that a foreign process on one of the cores costs little. FTZ and DAZ are on inside run() and restored behind it.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace poise {

class Pool {
  public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return size_; }

    // Calls task(argument, worker) on every worker; the caller is worker 0. Returns when all have finished.
    void run(void (*task)(void*, int), void* argument);

    // Inside a task: waits for all workers.
    void barrier();

    // Waits until `value` is `target`: spins, then yields, then parks. Whoever sets it calls notify_all.
    static void wait_until(std::atomic<uint32_t>& value, uint32_t target);

    template <class F> void run(F& f) {
        run([](void* argument, int worker) { (*static_cast<F*>(argument))(worker); }, &f);
    }

  private:
    void work(int worker);

    const int size_;
    void (*task_)(void*, int) = nullptr;
    void* argument_ = nullptr;
    bool stop_ = false;
    alignas(64) std::atomic<uint32_t> epoch_{0};       // rises when a task starts
    alignas(64) std::atomic<uint32_t> generation_{0};  // rises when a barrier opens
    alignas(64) std::atomic<int> arrived_{0};
    std::vector<std::thread> workers_;
};

// Flush-to-zero and denormals-are-zero for the current thread while it lives.
class FlushDenormals {
  public:
    FlushDenormals();
    ~FlushDenormals();

  private:
    uint64_t saved_;
};

}  // namespace poise
