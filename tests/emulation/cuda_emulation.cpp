#include "cuda_emulation.h"

#include <memory>
#include <random>

#if !defined(__x86_64__)
#error "the CUDA emulation switches stacks on x86-64 only"
#endif

// Saves the callee-saved registers and the stack pointer of the caller in *from, continues where `to` was saved.
asm(R"(
.text
.globl fenwick_emulation_switch
fenwick_emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
extern "C" void fenwick_emulation_switch(void** from, void* to);

namespace emulation {

int thread = 0;
dim3 grid_size, block_size, block_position;

namespace {

constexpr std::size_t stack_bytes = 256 * 1024;
constexpr std::size_t guard_bytes = 256;
constexpr int warp_size = 32, team_size = 128;

enum class State { ready, at_collective, at_barrier, at_team_barrier, waiting, done };

struct Copy {
    void* to;
    const void* from;
    std::size_t bytes;
    bool valid;
};
// Copies that arrive at a barrier once they are complete.
struct Arrival {
    std::vector<Copy> copies;
    Barrier* barrier;
    std::size_t units = 1;  // arrivals, or 16 bytes each
};
struct Fiber {
    void* stack_pointer = nullptr;
    State state = State::done;
    Operation operation = nullptr;
    void* argument = nullptr;
    const Barrier* barrier = nullptr;  // waited for: the end of the phase of this parity
    int parity = 0;
    std::vector<Copy> copies;               // since the last group
    std::vector<std::vector<Copy>> groups;  // oldest first
    std::unique_ptr<unsigned char[]> stack;
};

std::vector<Fiber> fibers;
std::vector<Arrival> arrivals;
void* scheduler = nullptr;
const std::function<void()>* body_of_kernel = nullptr;
unsigned char* shared = nullptr;

Fiber& current() { return fibers[static_cast<std::size_t>(thread)]; }

void leave(State state) {
    Fiber& fiber = current();
    fiber.state = state;
    fenwick_emulation_switch(&fiber.stack_pointer, scheduler);
}

void enter_fiber() {
    (*body_of_kernel)();
    leave(State::done);
    stop("a finished thread was resumed");
}

void prepare(Fiber& fiber) {
    if (!fiber.stack) fiber.stack = std::make_unique<unsigned char[]>(stack_bytes);
    const auto top = (reinterpret_cast<std::uintptr_t>(fiber.stack.get()) + stack_bytes - 64) / 16 * 16;
    auto** stack = reinterpret_cast<void**>(top);
    *--stack = nullptr;  // the return address of enter_fiber, and the alignment that a call leaves
    *--stack = reinterpret_cast<void*>(&enter_fiber);
    for (int i = 0; i < 6; ++i) *--stack = nullptr;
    fiber.stack_pointer = stack;
    fiber.state = State::ready;
    fiber.copies.clear();
    fiber.groups.clear();
}

bool phase_ended(const Barrier& barrier, int parity) { return static_cast<int>(barrier.phase % 2) != parity; }

void complete(const std::vector<Copy>& copies) {
    for (const Copy& copy : copies) {
        if (copy.valid) {
            std::memcpy(copy.to, copy.from, copy.bytes);
        } else {
            std::memset(copy.to, 0, copy.bytes);
        }
    }
}
void complete_arrival(std::size_t index) {
    std::swap(arrivals[index], arrivals.back());
    const Arrival last = std::move(arrivals.back());
    arrivals.pop_back();
    complete(last.copies);
    for (std::size_t i = 0; i < last.units; ++i) arrive(last.barrier);
}

// Runs the ready threads of a warp up to their next stop; whether anything ran.
bool advance(int warp) {
    Fiber* const lanes = &fibers[static_cast<std::size_t>(warp * warp_size)];
    bool ran = false, collective = false;
    for (int lane = 0; lane < warp_size; ++lane) {
        if (lanes[lane].state == State::waiting && phase_ended(*lanes[lane].barrier, lanes[lane].parity))
            lanes[lane].state = State::ready;
        if (lanes[lane].state == State::ready) {
            ran = true;
            thread = warp * warp_size + lane;
            fenwick_emulation_switch(&scheduler, lanes[lane].stack_pointer);
        }
        collective |= lanes[lane].state == State::at_collective;
    }
    if (!collective) return ran;
    void* arguments[warp_size];
    for (int lane = 0; lane < warp_size; ++lane) {
        if (lanes[lane].state != State::at_collective || lanes[lane].operation != lanes[0].operation)
            stop("the threads of a warp are at different instructions");
        arguments[lane] = lanes[lane].argument;
        lanes[lane].state = State::ready;
    }
    lanes[0].operation(arguments);
    return true;
}

void run_block(std::mt19937& random, std::vector<int>& order) {
    const auto count = static_cast<std::size_t>(block_size.x);
    for (std::size_t t = 0; t < count; ++t) prepare(fibers[t]);
    for (;;) {
        bool progress = false;
        std::shuffle(order.begin(), order.end(), random);
        for (int warp : order) {
            const auto steps = 1 + random() % 20;  // how far this warp gets before the next one moves
            for (std::size_t i = 0; i < steps && advance(warp); ++i) progress = true;
        }
        // In any order: the next ones may be there before these.
        for (std::size_t n = arrivals.size(); n > 0 && random() % 8 != 0; --n) {
            complete_arrival(random() % arrivals.size());
            progress = true;
        }
        for (std::size_t team = 0; team + team_size <= count; team += team_size) {
            const auto first = fibers.begin() + static_cast<std::ptrdiff_t>(team), last = first + team_size;
            if (!std::all_of(first, last, [](const Fiber& f) { return f.state == State::at_team_barrier; })) continue;
            std::for_each(first, last, [](Fiber& f) { f.state = State::ready; });
            progress = true;
        }
        std::size_t finished = 0, waiting = 0;
        for (std::size_t t = 0; t < count; ++t) {
            finished += fibers[t].state == State::done;
            waiting += fibers[t].state == State::at_barrier;
        }
        if (finished == count) {
            if (!arrivals.empty()) stop("a block ended before its copies");
            return;
        }
        if (waiting == count) {
            for (std::size_t t = 0; t < count; ++t) fibers[t].state = State::ready;
            progress = true;
        }
        if (!progress && arrivals.empty()) stop("deadlock: some threads wait at a barrier that others never reach");
    }
}

float half_of(std::uint32_t pair, int which) { return __uint_as_float(which != 0 ? pair & 0xffff0000u : pair << 16); }

}  // namespace

void barrier() { leave(State::at_barrier); }
void synchronize_team(int) { leave(State::at_team_barrier); }

void collective(Operation operation, void* argument) {
    current().operation = operation;
    current().argument = argument;
    leave(State::at_collective);
}

unsigned char* shared_memory() { return shared; }

void copy_async(void* to, const void* from, std::size_t bytes, bool valid) {
    if (reinterpret_cast<std::uintptr_t>(to) % bytes != 0 || reinterpret_cast<std::uintptr_t>(from) % bytes != 0)
        stop("cp.async with an address that is no multiple of its size");
    std::memset(to, 0xff, bytes);
    current().copies.push_back({to, from, bytes, valid});
}

void commit_async() {
    current().groups.push_back(std::move(current().copies));
    current().copies.clear();
}

void finish_copies(int pending_groups) {
    auto& groups = current().groups;
    while (static_cast<int>(groups.size()) > pending_groups) {
        complete(groups.front());
        groups.erase(groups.begin());
    }
    // A wait for everything: also what no group holds.
    if (pending_groups > 0) return;
    complete(current().copies);
    current().copies.clear();
}

void initialize(Barrier* barrier, int arrivals_of_phase) {
    *barrier = {static_cast<std::uint16_t>(arrivals_of_phase), static_cast<std::uint16_t>(arrivals_of_phase), 0};
}
void arrive(Barrier* barrier) {
    if (barrier->missing == 0) stop("an arrival at a barrier that was not initialized");
    if (--barrier->missing > 0) return;
    barrier->missing = barrier->arrivals;
    ++barrier->phase;
}
void arrive_after_copies(Barrier* barrier) {
    arrivals.push_back({std::move(current().copies), barrier});
    current().copies.clear();
}
void arrive_expecting(Barrier* barrier, int bytes) {
    barrier->missing = static_cast<std::uint16_t>(barrier->missing + bytes / 16);
    arrive(barrier);
}
void copy_bulk(void* to, const void* from, int bytes, Barrier* barrier) {
    if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0 || reinterpret_cast<std::uintptr_t>(from) % 16 != 0 ||
        bytes % 16 != 0)
        stop("a bulk copy of no multiple of 16 bytes");
    const auto count = static_cast<std::size_t>(bytes);
    std::memset(to, 0xff, count);
    arrivals.push_back({{{to, from, count, true}}, barrier, count / 16});
}
bool has_ended(const Barrier* barrier, int parity) { return phase_ended(*barrier, parity); }
void wait(const Barrier* barrier, int parity) {
    if (phase_ended(*barrier, parity)) return;
    current().barrier = barrier;
    current().parity = parity;
    leave(State::waiting);
}

void mma_16x8x16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    struct Argument {
        float* c;
        const std::uint32_t* a;
        std::uint32_t b[2];
    } argument{c, a, {b0, b1}};
    collective(
        [](void* const* all) {
            float a_matrix[16][16], b_matrix[16][8];
            for (int t = 0; t < warp_size; ++t) {
                const auto* mine = static_cast<const Argument*>(all[t]);
                for (int part = 0; part < 4; ++part)
                    for (int e = 0; e < 2; ++e)
                        a_matrix[t / 4 + part % 2 * 8][2 * (t % 4) + part / 2 * 8 + e] = half_of(mine->a[part], e);
                for (int part = 0; part < 2; ++part)
                    for (int e = 0; e < 2; ++e) b_matrix[2 * (t % 4) + part * 8 + e][t / 4] = half_of(mine->b[part], e);
            }
            for (int t = 0; t < warp_size; ++t)
                for (int e = 0; e < 4; ++e) {
                    float sum = static_cast<Argument*>(all[t])->c[e];
                    for (int k = 0; k < 16; ++k) sum += a_matrix[t / 4 + e / 2 * 8][k] * b_matrix[k][2 * (t % 4) + e % 2];
                    static_cast<Argument*>(all[t])->c[e] = sum;
                }
        },
        &argument);
}

void run(dim3 grid, dim3 block, std::size_t shared_bytes, const std::function<void()>& body) {
    if (block.y != 1 || block.z != 1 || block.x % warp_size != 0)
        stop("only blocks of whole warps in one dimension are emulated");
    static std::mt19937 random(1);
    grid_size = grid;
    block_size = block;
    body_of_kernel = &body;
    if (fibers.size() < block.x) fibers.resize(block.x);
    std::vector<int> order(block.x / warp_size);
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    std::vector<unsigned char> memory(shared_bytes + guard_bytes + 128);
    shared = memory.data() + (128 - reinterpret_cast<std::uintptr_t>(memory.data()) % 128);
    for (block_position.z = 0; block_position.z < grid.z; ++block_position.z)
        for (block_position.y = 0; block_position.y < grid.y; ++block_position.y)
            for (block_position.x = 0; block_position.x < grid.x; ++block_position.x) {
                std::memset(shared, 0xff, shared_bytes);  // NaN
                std::memset(shared + shared_bytes, 0x5a, guard_bytes);
                run_block(random, order);
                for (std::size_t i = 0; i < guard_bytes; ++i)
                    if (shared[shared_bytes + i] != 0x5a) stop("the kernel wrote behind its shared memory");
            }
}

}  // namespace emulation
