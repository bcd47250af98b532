// Every thread of a threadgroup is a fibre: a stack of its own, on the one thread that launches.
#pragma once
#include <sys/mman.h>

#include "state.hpp"

#if defined(MSL_ASAN)
extern "C" {
void __sanitizer_start_switch_fiber(void**, const void*, size_t);
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
void __asan_poison_memory_region(const volatile void*, size_t);
void __asan_unpoison_memory_region(const volatile void*, size_t);
}
#else
static inline void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
static inline void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
static inline void __asan_poison_memory_region(const volatile void*, size_t) {}
static inline void __asan_unpoison_memory_region(const volatile void*, size_t) {}
#endif

static const size_t STACK_SIZE = 256 * 1024;

// Saves what a called function must keep and its stack, and goes on with another one.
extern "C" void msl_switch(void** save, void* to) __attribute__((visibility("hidden")));
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size msl_switch,.-msl_switch
)");

// The pages of a stack cost memory only once they are touched.
static char* stack_of(int thread) {
  static char* const stacks = [] {
    void* pages = mmap(nullptr, STACK_SIZE * MAX_THREADS, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) abort();
    return static_cast<char*>(pages);
  }();
  return stacks + STACK_SIZE * thread;
}

static void to_main() {
  Fibre& fibre = fibres[state.current];
  const bool done = fibre.state == DONE;
  __sanitizer_start_switch_fiber(done ? nullptr : &fibre.fake_stack, state.main_stack, state.main_stack_size);
  msl_switch(&fibre.stack_pointer, state.main_stack_pointer);
  __sanitizer_finish_switch_fiber(fibre.fake_stack, &state.main_stack, &state.main_stack_size);
}

static void fibre_main() {
  __sanitizer_finish_switch_fiber(nullptr, &state.main_stack, &state.main_stack_size);
  state.launch->kernel->enter();
  fibres[state.current].state = DONE;
  to_main();
  abort();
}

static void start(int thread) {
  Fibre& fibre = fibres[thread];
  char* stack = stack_of(thread);
  // A launch that failed left its frames behind.
  __asan_unpoison_memory_region(stack, STACK_SIZE);
  void** top = reinterpret_cast<void**>(stack + STACK_SIZE);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(fibre_main);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  fibre = {};
  fibre.stack_pointer = top;
}

static void resume(int thread) {
  Fibre& fibre = fibres[thread];
  state.current = thread;
  __sanitizer_start_switch_fiber(&state.main_fake_stack, stack_of(thread), STACK_SIZE);
  msl_switch(&state.main_stack_pointer, fibre.stack_pointer);
  __sanitizer_finish_switch_fiber(state.main_fake_stack, nullptr, nullptr);
}

// Ends a thread in the middle of its work.
[[noreturn]] static void give_up() {
  to_main();
  abort();
}
