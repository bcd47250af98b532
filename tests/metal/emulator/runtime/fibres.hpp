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

// Goes on with another stack. Its top is where to go on, as it is left here for the fibre that comes back.
//
// It is no function and jumps, so that calls and returns stay in pairs for the processor, which guesses where a return
// goes from the calls before it: lanes that take turns return to the same addresses. What a function may keep in registers
// is lost, and the compiler knows it; below the stack may be 128 bytes that are in use.
[[gnu::always_inline]] static inline void switch_stack(void** save, void* to) {
  asm volatile(
      "leaq -128(%%rsp), %%rsp; pushq %%rbp; pushq %%rbx; leaq 1f(%%rip), %%rax; pushq %%rax\n"
      "movq %%rsp, (%0); movq %1, %%rsp; popq %%rax; jmp *%%rax\n"
      "1: popq %%rbx; popq %%rbp; leaq 128(%%rsp), %%rsp"
      : "+D"(save), "+S"(to)
      :
      : "memory", "cc", "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1",
        "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14",
        "xmm15");
}

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

// The first action of a fibre that resumes or begins.
static void arrived(void* fake_stack) {
  const bool is_from_main = state.is_from_main;
  state.is_from_main = false;
  __sanitizer_finish_switch_fiber(fake_stack, is_from_main ? &state.main_stack : nullptr,
                                  is_from_main ? &state.main_stack_size : nullptr);
}

static void to_main() {
  Fibre& fibre = fibres[state.current];
  const bool done = fibre.state == DONE;
  __sanitizer_start_switch_fiber(done ? nullptr : &fibre.fake_stack, state.main_stack, state.main_stack_size);
  switch_stack(&fibre.stack_pointer, state.main_stack_pointer);
  arrived(fibre.fake_stack);
}

// From one fibre to another.
static void to_fibre(int thread) {
  Fibre& fibre = fibres[state.current];
  if (thread == state.current) return;
  state.current = thread;
  __sanitizer_start_switch_fiber(&fibre.fake_stack, stack_of(thread), STACK_SIZE);
  switch_stack(&fibre.stack_pointer, fibres[thread].stack_pointer);
  arrived(fibre.fake_stack);
}

static void fibre_main() {
  arrived(nullptr);
  state.launch->kernel->enter();
  fibres[state.current].state = DONE;
  to_main();
  abort();
}

static void start(int thread) {
  Fibre& fibre = fibres[thread];
  void** top = reinterpret_cast<void**>(stack_of(thread) + STACK_SIZE);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(fibre_main);
  fibre = {};
  fibre.stack_pointer = top;
}

// A failed launch abandons its frames.
static void forget_frames() { __asan_unpoison_memory_region(stack_of(0), STACK_SIZE * state.num_threads); }

static void resume(int thread) {
  Fibre& fibre = fibres[thread];
  state.current = thread;
  state.is_from_main = true;
  __sanitizer_start_switch_fiber(&state.main_fake_stack, stack_of(thread), STACK_SIZE);
  switch_stack(&state.main_stack_pointer, fibre.stack_pointer);
  __sanitizer_finish_switch_fiber(state.main_fake_stack, nullptr, nullptr);
}

// Ends a thread in the middle of its work.
[[noreturn]] static void give_up() {
  to_main();
  abort();
}
