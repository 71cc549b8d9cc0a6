// Operations of the lanes of a warp. The last lane to come, or the exit of one that is waited for, does it for all.
namespace softgpu {
// Whether all that the waiting lane needs wait in the same operation; if so, it is done.
inline bool try_warp_op(Block* b, unsigned warp, unsigned lane) {
    Fiber* lanes = &b->fibers[warp * WARP];
    unsigned need = lanes[lane].mask & ~b->exited[warp];
    if ((b->arrived[warp] & need) != need) return false;
    void* all[WARP] = {};
    for (unsigned rest = need; rest; rest &= rest - 1) {
        unsigned l = __builtin_ctz(rest);
        if (lanes[l].op != lanes[lane].op || lanes[l].mask != lanes[lane].mask) return false;
        all[l] = lanes[l].deposit;
    }
    lanes[lane].op(all);
    b->arrived[warp] &= ~need;
    for (unsigned rest = need; rest; rest &= rest - 1) {
        Fiber& f = lanes[__builtin_ctz(rest)];
        if (f.state == AtWarp) f.state = Ready;
    }
    return true;
}
inline void settle_warp(Block* b, unsigned warp) {
    for (unsigned l = 0; l < WARP; l++) if (b->arrived[warp] >> l & 1) try_warp_op(b, warp, l);
}
// `F` is called once with the deposits of all lanes in `mask` (null for others).
template <class T, class F> inline void warp_op(unsigned mask, T* mine, F) {
    Block* b = block();
    Fiber* me = b->now;
    unsigned i = me - b->fibers, warp = i / WARP, lane = i % WARP;
    if (!(mask >> lane & 1)) fail(LAUNCH_FAILED, "calls a warp operation of the lanes %#x without being one of them", mask);
    me->deposit = mine;
    me->mask = mask;
    me->op = [](void** all) { (*(F*)nullptr)((T**)all); };
    b->arrived[warp] |= 1u << lane;
    if (!try_warp_op(b, warp, lane)) { me->state = AtWarp; yield(); }
}
template <class T> struct Shuffle { T value, out; int from; };
// A lane that takes no part gives poison.
template <class T> inline T shuffle(unsigned mask, T v, int from) {
    Shuffle<T> s{v, v, from};
    warp_op(mask, &s, [](Shuffle<T>** all) {
        for (unsigned l = 0; l < WARP; l++) if (all[l]) {
            unsigned k = all[l]->from;
            if (all[k]) all[l]->out = all[k]->value; else memset((void*)&all[l]->out, 0xff, sizeof(T));
        }
    });
    return s.out;
}
inline int lane() { Block* b = block(); return (b->now - b->fibers) % WARP; }
// All lanes get `f` of the values of all.
template <class T, class F> inline T reduce(unsigned mask, T v, F) {
    struct R { T v; } r{v};
    warp_op(mask, &r, [](R** all) {
        bool any = false; T sum{};
        for (unsigned l = 0; l < WARP; l++) if (all[l]) { sum = any ? (*(F*)nullptr)(sum, all[l]->v) : all[l]->v; any = true; }
        for (unsigned l = 0; l < WARP; l++) if (all[l]) all[l]->v = sum;
    });
    return r.v;
}
}
inline void __syncwarp(unsigned mask = ~0u) { int x = 0; softgpu::warp_op(mask, &x, [](int**) {}); }
template <class T> inline T __shfl_sync(unsigned m, T v, int from, int w = 32) { int l = softgpu::lane(); return softgpu::shuffle(m, v, (l & ~(w - 1)) | (from & (w - 1))); }
template <class T> inline T __shfl_xor_sync(unsigned m, T v, int by, int w = 32) { int l = softgpu::lane(), k = l ^ by; return softgpu::shuffle(m, v, k > (l | (w - 1)) ? l : k); }
template <class T> inline T __shfl_down_sync(unsigned m, T v, unsigned by, int w = 32) { int l = softgpu::lane(), k = l + int(by); return softgpu::shuffle(m, v, k > (l | (w - 1)) ? l : k); }
template <class T> inline T __shfl_up_sync(unsigned m, T v, unsigned by, int w = 32) { int l = softgpu::lane(), k = l - int(by); return softgpu::shuffle(m, v, k < (l & ~(w - 1)) ? l : k); }
inline unsigned __ballot_sync(unsigned m, int p) { return softgpu::reduce(m, p ? 1u << softgpu::lane() : 0u, [](unsigned a, unsigned b) { return a | b; }); }
inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, !p) == 0; }
inline unsigned __activemask() { softgpu::Block* b = softgpu::block(); return ~b->exited[(b->now - b->fibers) / 32]; }
template <class T> inline unsigned __match_any_sync(unsigned m, T v) {
    struct M { T v; unsigned same; } x{v, 0};
    softgpu::warp_op(m, &x, [](M** all) { for (int l = 0; l < 32; l++) if (all[l]) { all[l]->same = 0; for (int k = 0; k < 32; k++) if (all[k] && !memcmp(&all[k]->v, &all[l]->v, sizeof(T))) all[l]->same |= 1u << k; } });
    return x.same;
}
template <class T> inline unsigned __match_all_sync(unsigned m, T v, int* p) { unsigned same = __match_any_sync(m, v), all = m & __activemask(); *p = same == all; return *p ? all : 0; }
inline int __reduce_add_sync(unsigned m, int v) { return softgpu::reduce(m, v, [](int a, int b) { return int(unsigned(a) + unsigned(b)); }); }
inline unsigned __reduce_add_sync(unsigned m, unsigned v) { return softgpu::reduce(m, v, [](unsigned a, unsigned b) { return a + b; }); }
template <class T> inline T __reduce_min_sync(unsigned m, T v) { return softgpu::reduce(m, v, [](T a, T b) { return a < b ? a : b; }); }
template <class T> inline T __reduce_max_sync(unsigned m, T v) { return softgpu::reduce(m, v, [](T a, T b) { return a > b ? a : b; }); }
inline unsigned __reduce_and_sync(unsigned m, unsigned v) { return softgpu::reduce(m, v, [](unsigned a, unsigned b) { return a & b; }); }
inline unsigned __reduce_or_sync(unsigned m, unsigned v) { return softgpu::reduce(m, v, [](unsigned a, unsigned b) { return a | b; }); }
inline unsigned __reduce_xor_sync(unsigned m, unsigned v) { return softgpu::reduce(m, v, [](unsigned a, unsigned b) { return a ^ b; }); }
