// A grid's blocks over OS threads, and what the library reads of a kernel. The structures mirror those of module.rs.
namespace softgpu {
struct Launch {
    void** args; unsigned grid[3], block[3]; size_t dynamic; uint64_t seed; unsigned n_os;
    void* (*arena)(); // of the calling OS thread
    void (*parallel)(void (*work)(void*), void* data, unsigned n_os);
    char* message; size_t static_shared;
};
struct Kernel { size_t n_args; const size_t* sizes; unsigned max_threads; int (*run)(Launch*); };
struct Grid { Launch* launch; void (*entry)(void**); uint64_t n_blocks, first, at; bool back; int code; size_t static_most; };

inline void work(void* data) {
    Grid* g = (Grid*)data;
    const Launch* l = g->launch;
    Block* b = (Block*)l->arena();
    if (!b->is_prepared) prepare_arena(b);
    b->dim = {l->block[0], l->block[1], l->block[2]};
    b->grid = {l->grid[0], l->grid[1], l->grid[2]};
    b->n = b->dim.x * b->dim.y * b->dim.z;
    b->n_warps = (b->n + WARP - 1) / WARP;
    b->entry = g->entry;
    b->args = l->args;
    b->dynamic_bytes = l->dynamic;
    b->dynamic = b->dynamic_end - (l->dynamic + 1023) / 1024 * 1024;
    memset(b->place, 0, n_shared_variables * sizeof *b->place);
    b->static_bytes = b->static_poisoned = 0;
    b->n_canaries = 0;
    b->code = 0;
    for (uint64_t k; (k = __atomic_fetch_add(&g->at, 1, __ATOMIC_RELAXED)) < g->n_blocks && !__atomic_load_n(&g->code, __ATOMIC_RELAXED);) {
        uint64_t i = (g->first + (g->back ? g->n_blocks - k : k)) % g->n_blocks;
        b->index = {unsigned(i % b->grid.x), unsigned(i / b->grid.x % b->grid.y), unsigned(i / b->grid.x / b->grid.y)};
        b->rng = (l->seed + 1) * 0xD1342543DE82EF95ull ^ (i + 1) * 0x9E3779B97F4A7C15ull;
        next(b->rng);
        run_block(b);
        int none = 0;
        if (b->code && __atomic_compare_exchange_n(&g->code, &none, b->code, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) strcpy(l->message, b->message);
    }
    size_t most = __atomic_load_n(&g->static_most, __ATOMIC_RELAXED);
    while (most < b->static_bytes && !__atomic_compare_exchange_n(&g->static_most, &most, b->static_bytes, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
}
inline int run_grid(void (*entry)(void**), Launch* l) {
    if (n_shared_variables > MAX_SHARED_VARIABLES) { strcpy(l->message, "the module has more shared variables than softgpu has room for"); return INVALID_VALUE; }
    uint64_t n_blocks = uint64_t(l->grid[0]) * l->grid[1] * l->grid[2], n_threads = n_blocks * l->block[0] * l->block[1] * l->block[2];
    uint64_t rng = l->seed * 0x9E3779B97F4A7C15ull + 1, first = next(rng) % n_blocks;
    Grid g = {l, entry, n_blocks, first, 0, bool(next(rng) & 1), 0, 0};
    unsigned n_os = n_threads < 8192 || n_blocks < 2 ? 1 : n_blocks < l->n_os ? unsigned(n_blocks) : l->n_os;
    if (n_os < 2) work(&g); else l->parallel(work, &g, n_os);
    l->static_shared = g.static_most;
    return g.code;
}
template <class... A, size_t... I> inline void call(void (*f)(A...), void** a, std::index_sequence<I...>) { f(*(A*)a[I]...); }
template <auto F> struct Entry;
template <class... A, void (*F)(A...)> struct Entry<F> {
    static constexpr size_t N = sizeof...(A);
    static constexpr size_t SIZES[N + 1] = {sizeof(A)..., 0};
    static_assert((sizeof(A) + ... + 0) <= 32764, "a kernel has at most 32764 bytes of parameters");
    static void enter(void** a) { call(F, a, std::index_sequence_for<A...>{}); }
    static int run(Launch* l) { return run_grid(enter, l); }
};
constexpr unsigned bound(unsigned threads = MAX_THREADS, unsigned = 0, unsigned = 0) { return threads; }
}
// Behind each kernel: `symbol` is its name for the library, `f` the function, then the arguments of __launch_bounds__.
#define SOFTGPU_KERNEL(symbol, f, ...) \
    extern "C" __attribute__((visibility("default"), used)) constexpr softgpu::Kernel softgpu_kernel_##symbol = { \
        softgpu::Entry<f>::N, softgpu::Entry<f>::SIZES, softgpu::bound(__VA_ARGS__), softgpu::Entry<f>::run};
