// A block of threads: fibers, their scheduler, the barrier, shared memory.
//
// Each OS thread has an arena, aligned to its size, so a fiber finds its block by its stack pointer.
namespace softgpu {
constexpr unsigned WARP = 32, MAX_THREADS = 1024, MAX_SHARED_VARIABLES = 2048;
constexpr size_t ARENA = size_t(128) << 20, PAGE = 4096;
// Not a power of two: the tops of all stacks would share a few sets of the cache.
constexpr size_t STACK = (64 << 10) + 13 * 64;
constexpr size_t STATIC_BYTES = 64 << 10, DYNAMIC_BYTES = 256 << 10, CANARY = 16;
constexpr int LAUNCH_FAILED = 719, ASSERT_FAILED = 710, MISALIGNED = 716, INVALID_SPACE = 717, INVALID_VALUE = 1;

enum State : uint8_t { Ready, AtBarrier, AtWarp, Done };
struct AsyncCopy { void* to; const void* from; unsigned bytes, zeros; bool is_commit; };
struct AsyncCopies {
    AsyncCopy* at; unsigned n, room;
    void push(AsyncCopy c) {
        if (n == room) at = (AsyncCopy*)__builtin_realloc(at, (room = room ? 2 * room : 64) * sizeof c);
        at[n++] = c;
    }
};
struct Fiber {
    void* sp; uint3 tid; State state;
    unsigned mask; void (*op)(void**); void* deposit; // while AtWarp
    AsyncCopies copies;
};
struct Votes { unsigned n, n_true; };
struct Block {
    bool is_prepared; unsigned n, n_live, n_at_barrier, n_warps;
    void* scheduler; Fiber* now; void (*entry)(void**); void** args;
    uint3 index, dim, grid; uint64_t rng;
    unsigned arrived[WARP], exited[WARP]; Votes votes, result;
    char *statics, *dynamic, *dynamic_end; size_t static_bytes, static_poisoned, static_most, dynamic_bytes;
    int code; char message[256];
    unsigned place[MAX_SHARED_VARIABLES]; // of each shared variable, plus one; none was used yet: 0
    struct { unsigned at, bytes; } canaries[MAX_SHARED_VARIABLES]; unsigned n_canaries;
    Fiber fibers[MAX_THREADS];
};
constexpr size_t STACKS_AT = (sizeof(Block) / PAGE + 1) * PAGE;
constexpr size_t STATICS_AT = STACKS_AT + (MAX_THREADS * STACK / PAGE + 2) * PAGE, DYNAMIC_AT = STATICS_AT + STATIC_BYTES + PAGE;
static_assert(DYNAMIC_AT + DYNAMIC_BYTES + PAGE <= ARENA);

// For code that runs on a fiber only.
inline Block* block() {
    uintptr_t sp;
    asm("movq %%rsp, %0" : "=r"(sp));
    return (Block*)(sp & ~(ARENA - 1));
}
inline uint64_t next(uint64_t& s) { s ^= s << 13; s ^= s >> 7; s ^= s << 17; return s; }

extern "C" void softgpu_switch(void** save, void* to);
asm(R"(
.text
.local softgpu_switch
softgpu_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    popq %rcx
    jmp *%rcx
)");

// Ends the whole grid with an error of the launch.
template <class... A> [[noreturn]] __attribute__((noinline, cold)) void fail(int code, const char* format, A... a) {
    Block* b = block();
    b->code = code;
    int n = snprintf(b->message, sizeof b->message, "block (%u, %u, %u), thread (%u, %u, %u): ", b->index.x, b->index.y,
                     b->index.z, b->now->tid.x, b->now->tid.y, b->now->tid.z);
    snprintf(b->message + n, sizeof b->message - n, format, a...);
    softgpu_switch(&b->now->sp, b->scheduler);
    __builtin_unreachable();
}
// To the next fiber of the same warp that can run, else to the scheduler.
inline __attribute__((noinline)) void yield() {
    Block* b = block();
    Fiber* me = b->now;
    unsigned i = me - b->fibers, first = i & ~(WARP - 1), width = b->n - first < WARP ? b->n - first : WARP;
    for (unsigned k = 1; k < width; k++) {
        Fiber* f = &b->fibers[first + (i - first + k) % width];
        if (f->state == Ready) { b->now = f; softgpu_switch(&me->sp, f->sp); return; }
    }
    softgpu_switch(&me->sp, b->scheduler);
}
// In a spin: lets all others run first.
inline void pause() { Block* b = block(); softgpu_switch(&b->now->sp, b->scheduler); }

inline void release_barrier(Block* b) {
    for (unsigned i = 0; i < b->n; i++) if (b->fibers[i].state == AtBarrier) b->fibers[i].state = Ready;
    b->result = b->votes;
    b->votes = {0, 0};
    b->n_at_barrier = 0;
}
// Threads that have returned do not count.
inline Votes barrier(bool vote) {
    Block* b = block();
    b->votes.n++;
    b->votes.n_true += vote;
    if (++b->n_at_barrier == b->n_live) release_barrier(b);
    else { b->now->state = AtBarrier; yield(); }
    return b->result;
}

// A dynamic allocation's end lies at a guard page.
inline void* dynamic_shared() { return block()->dynamic; }
template <class T> struct DynamicShared {
    operator T*() const { return (T*)dynamic_shared(); }
    T& operator[](size_t i) const { return ((T*)dynamic_shared())[i]; }
    T* operator+(size_t i) const { return (T*)dynamic_shared() + i; }
};
inline unsigned n_shared_variables = 0;
template <class SITE> struct SharedVariable { static inline const unsigned id = n_shared_variables++; };
inline __attribute__((noinline, cold)) unsigned place_shared(unsigned id, size_t bytes, size_t align) {
    Block* b = block();
    size_t at = (b->static_bytes + align - 1) & ~(align - 1), end = at + bytes;
    if (end + CANARY > STATIC_BYTES) fail(INVALID_VALUE, "more than %zu bytes of static shared memory", STATIC_BYTES - CANARY);
    b->canaries[b->n_canaries++] = {unsigned(end), CANARY};
    b->static_bytes = end + CANARY;
    if (b->static_bytes > b->static_poisoned) {
        memset(b->statics + b->static_poisoned, 0xff, b->static_bytes - b->static_poisoned);
        b->static_poisoned = b->static_bytes;
    }
    return b->place[id] = unsigned(at) + 1;
}
// Each declaration, in each instantiation of a template around it, is a variable of its own: SITE is a lambda's type.
template <class T, size_t ALIGN = alignof(T), class SITE> inline T& shared(SITE) {
    unsigned id = SharedVariable<SITE>::id, at = block()->place[id];
    if (!at) at = place_shared(id, sizeof(T), ALIGN > alignof(T) ? ALIGN : alignof(T));
    return *(T*)(block()->statics + at - 1);
}
inline bool is_shared(const void* p) {
    Block* b = block();
    return ((char*)p >= b->statics && (char*)p < b->statics + STATIC_BYTES) || ((char*)p >= b->dynamic && (char*)p < b->dynamic_end);
}

void settle_warp(Block* b, unsigned warp);
inline void finish_fiber() {
    Block* b = block();
    Fiber* me = b->now;
    unsigned i = me - b->fibers;
    me->state = Done;
    b->n_live--;
    b->exited[i / WARP] |= 1u << i % WARP;
    if (b->arrived[i / WARP]) settle_warp(b, i / WARP);
    if (b->n_live && b->n_at_barrier == b->n_live) release_barrier(b);
    yield();
    __builtin_trap();
}
inline void start_fiber() {
    Block* b = block();
    b->entry(b->args);
    finish_fiber();
}

inline void prepare_arena(Block* b) {
    char* base = (char*)b;
    mprotect(base + STATICS_AT - PAGE, PAGE, PROT_NONE);
    mprotect(base + DYNAMIC_AT - PAGE, PAGE, PROT_NONE);
    mprotect(base + DYNAMIC_AT + DYNAMIC_BYTES, PAGE, PROT_NONE);
    b->statics = base + STATICS_AT;
    b->dynamic_end = base + DYNAMIC_AT + DYNAMIC_BYTES;
    b->is_prepared = true;
}
inline void start_block(Block* b) {
    b->n_live = b->n;
    b->n_at_barrier = 0;
    b->votes = {0, 0};
    memset(b->dynamic, 0xff, b->dynamic_end - b->dynamic);
    memset(b->statics, 0xff, b->static_poisoned);
    for (unsigned w = 0; w < b->n_warps; w++) {
        unsigned width = b->n - w * WARP < WARP ? b->n - w * WARP : WARP;
        b->arrived[w] = 0;
        b->exited[w] = width == WARP ? 0 : ~0u << width;
    }
    unsigned x = 0, y = 0, z = 0;
    for (unsigned i = 0; i < b->n; i++) {
        Fiber& f = b->fibers[i];
        f.state = Ready;
        f.copies.n = 0;
        f.tid = {x, y, z};
        if (++x == b->dim.x) { x = 0; if (++y == b->dim.y) { y = 0; z++; } }
        void** top = (void**)((char*)b + STACKS_AT + (i + 1) * STACK - 64);
        *--top = nullptr;
        *--top = (void*)start_fiber;
        top -= 6;
        memset(top, 0, 48);
        f.sp = top;
    }
}
inline void report_stuck(Block* b) {
    unsigned n_barrier = 0, n_warp = 0;
    for (unsigned i = 0; i < b->n; i++) { n_barrier += b->fibers[i].state == AtBarrier; n_warp += b->fibers[i].state == AtWarp; }
    b->code = LAUNCH_FAILED;
    snprintf(b->message, sizeof b->message, "block (%u, %u, %u) cannot go on: of %u threads %u wait at a barrier, %u in a warp operation, %u have returned",
             b->index.x, b->index.y, b->index.z, b->n, n_barrier, n_warp, b->n - n_barrier - n_warp);
}
inline void check_canaries(Block* b) {
    auto is_poison = [](const char* p, size_t n) { for (size_t i = 0; i < n; i++) if (p[i] != char(0xff)) return false; return true; };
    const char* what = is_poison(b->dynamic + b->dynamic_bytes, b->dynamic_end - b->dynamic - b->dynamic_bytes) ? nullptr : "its dynamic shared memory";
    for (unsigned i = 0; i < b->n_canaries; i++) if (!is_poison(b->statics + b->canaries[i].at, b->canaries[i].bytes)) what = "a shared variable";
    if (!what) return;
    b->code = 700;
    snprintf(b->message, sizeof b->message, "block (%u, %u, %u) wrote behind the end of %s", b->index.x, b->index.y, b->index.z, what);
}
inline void run_block(Block* b) {
    start_block(b);
    while (b->n_live) {
        bool ran = false;
        unsigned first = next(b->rng) % b->n_warps, back = next(b->rng) & 1;
        for (unsigned k = 0; k < b->n_warps; k++) {
            unsigned w = (back ? first + b->n_warps - k : first + k) % b->n_warps, width = b->n - w * WARP < WARP ? b->n - w * WARP : WARP;
            for (unsigned at = next(b->rng) % width, l = 0; l < width; l++) {
                Fiber* f = &b->fibers[w * WARP + (at + l) % width];
                if (f->state != Ready) continue;
                ran = true;
                b->now = f;
                softgpu_switch(&b->scheduler, f->sp);
                if (b->code) return;
            }
        }
        if (!ran) { report_stuck(b); return; }
    }
    check_canaries(b);
}
}
#define threadIdx (softgpu::block()->now->tid)
#define blockIdx (softgpu::block()->index)
#define blockDim (softgpu::block()->dim)
#define gridDim (softgpu::block()->grid)
constexpr int warpSize = 32;
inline void __syncthreads() { softgpu::barrier(false); }
inline int __syncthreads_count(int p) { return softgpu::barrier(p != 0).n_true; }
inline int __syncthreads_or(int p) { return softgpu::barrier(p != 0).n_true != 0; }
inline int __syncthreads_and(int p) { softgpu::Votes v = softgpu::barrier(p != 0); return v.n_true == v.n; }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) { softgpu::pause(); }
[[noreturn]] inline void __trap() { softgpu::fail(softgpu::LAUNCH_FAILED, "__trap()"); }
inline void __brkpt() { __trap(); }
[[noreturn]] inline void __assert_failed(const char* text, const char* file, int line) {
    softgpu::fail(softgpu::ASSERT_FAILED, "%s:%d: assertion `%s` failed", file, line, text);
}
#undef assert
#ifdef NDEBUG
#define assert(x) ((void)0)
#else
#define assert(x) ((x) ? (void)0 : __assert_failed(#x, __FILE__, __LINE__))
#endif
