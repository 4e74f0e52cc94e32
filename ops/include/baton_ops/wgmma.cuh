// Hopper's matrix product of a warpgroup: 64 rows times n columns, 16 deep of bf16 or 32 of e4m3,
// fp32 sums.
//
// PTX wants every register of the sums by number, which is what the macros are for.
#ifndef BATON_OPS_WGMMA_CUH_
#define BATON_OPS_WGMMA_CUH_

#include <cstdint>

namespace baton_ops::cuda {

#define BATON_REGISTERS_4 "%0,%1,%2,%3"
#define BATON_REGISTERS_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define BATON_REGISTERS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define BATON_REGISTERS_24 BATON_REGISTERS_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define BATON_REGISTERS_32 BATON_REGISTERS_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define BATON_REGISTERS_48 \
  BATON_REGISTERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define BATON_REGISTERS_64 \
  BATON_REGISTERS_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define BATON_REGISTERS_80 \
  BATON_REGISTERS_64       \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define BATON_REGISTERS_96 \
  BATON_REGISTERS_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define BATON_REGISTERS_112                                                   \
  BATON_REGISTERS_96                                                          \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%" \
  "111"
#define BATON_REGISTERS_128 \
  BATON_REGISTERS_112       \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define BATON_SUMS_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define BATON_EIGHT_SUMS(i)                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define BATON_SUMS_8 BATON_EIGHT_SUMS(0)
#define BATON_SUMS_16 BATON_EIGHT_SUMS(0), BATON_EIGHT_SUMS(8)
#define BATON_SUMS_24 BATON_SUMS_16, BATON_EIGHT_SUMS(16)
#define BATON_SUMS_32 BATON_SUMS_24, BATON_EIGHT_SUMS(24)
#define BATON_SUMS_48 BATON_SUMS_32, BATON_EIGHT_SUMS(32), BATON_EIGHT_SUMS(40)
#define BATON_SUMS_64 BATON_SUMS_48, BATON_EIGHT_SUMS(48), BATON_EIGHT_SUMS(56)
#define BATON_SUMS_80 BATON_SUMS_64, BATON_EIGHT_SUMS(64), BATON_EIGHT_SUMS(72)
#define BATON_SUMS_96 BATON_SUMS_80, BATON_EIGHT_SUMS(80), BATON_EIGHT_SUMS(88)
#define BATON_SUMS_112 BATON_SUMS_96, BATON_EIGHT_SUMS(96), BATON_EIGHT_SUMS(104)
#define BATON_SUMS_128 BATON_SUMS_112, BATON_EIGHT_SUMS(112), BATON_EIGHT_SUMS(120)

#define BATON_WGMMA(n, registers) \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" registers "}"

// Both operands in shared memory, by descriptors. `adds` 0: the sums begin here.
template <int kColumns>
struct Wgmma;

#define BATON_DEFINE_WGMMA(n, count, a, b, p)                                                  \
  template <>                                                                                  \
  struct Wgmma<n> {                                                                            \
    static __device__ __forceinline__ void Multiply(float (&d)[count], uint64_t x, uint64_t y, \
                                                    int adds) {                                \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\n" BATON_WGMMA(               \
                       n, BATON_REGISTERS_##count) ", %" #a ", %" #b ", p, 1, 1, 0, 0;\n}\n"   \
                   : BATON_SUMS_##count                                                        \
                   : "l"(x), "l"(y), "r"(adds));                                               \
    }                                                                                          \
  };

BATON_DEFINE_WGMMA(8, 4, 4, 5, 6)
BATON_DEFINE_WGMMA(32, 16, 16, 17, 18)
BATON_DEFINE_WGMMA(48, 24, 24, 25, 26)
BATON_DEFINE_WGMMA(64, 32, 32, 33, 34)
BATON_DEFINE_WGMMA(96, 48, 48, 49, 50)
BATON_DEFINE_WGMMA(128, 64, 64, 65, 66)
BATON_DEFINE_WGMMA(160, 80, 80, 81, 82)
BATON_DEFINE_WGMMA(192, 96, 96, 97, 98)
BATON_DEFINE_WGMMA(256, 128, 128, 129, 130)

// The same of x that lies turned, by its 64 rows: element k of all of them, then the next one's.
struct WgmmaOfTurned {
  static __device__ __forceinline__ void Add(float (&d)[4], uint64_t x, uint64_t y) {
    asm volatile(BATON_WGMMA(8, BATON_REGISTERS_4) ", %4, %5, 1, 1, 1, 1, 0;\n"
                 : BATON_SUMS_4
                 : "l"(x), "l"(y));
  }
};

// The same of e4m3 numbers, 32 deep. Their products are exact; of their sums the tensor cores keep
// fewer bits than fp32 has, so who wants more of a long row adds what short parts of it made.
template <int kColumns>
struct WgmmaOfE4m3;

#define BATON_DEFINE_WGMMA_OF_E4M3(n, count, a, b, p)                                          \
  template <>                                                                                  \
  struct WgmmaOfE4m3<n> {                                                                      \
    static __device__ __forceinline__ void Multiply(float (&d)[count], uint64_t x, uint64_t y, \
                                                    int adds) {                                \
      asm volatile(                                                                            \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %" #p ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
          "k32.f32.e4m3.e4m3 {" BATON_REGISTERS_##count "}, %" #a ", %" #b ", p, 1, 1;\n}\n"   \
          : BATON_SUMS_##count                                                                 \
          : "l"(x), "l"(y), "r"(adds));                                                        \
    }                                                                                          \
  };

BATON_DEFINE_WGMMA_OF_E4M3(8, 4, 4, 5, 6)
BATON_DEFINE_WGMMA_OF_E4M3(16, 8, 8, 9, 10)
BATON_DEFINE_WGMMA_OF_E4M3(32, 16, 16, 17, 18)
BATON_DEFINE_WGMMA_OF_E4M3(64, 32, 32, 33, 34)
BATON_DEFINE_WGMMA_OF_E4M3(128, 64, 64, 65, 66)

// Adds the product of 16 columns in registers and a transposed operand in shared memory.
__device__ __forceinline__ void AddProduct(float (&d)[64], const uint32_t* x, uint64_t y) {
  asm volatile(BATON_WGMMA(128, BATON_REGISTERS_64) ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;\n"
               : BATON_SUMS_64
               : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y));
}

#undef BATON_DEFINE_WGMMA_OF_E4M3
#undef BATON_DEFINE_WGMMA
#undef BATON_WGMMA
#undef BATON_SUMS_128
#undef BATON_SUMS_112
#undef BATON_SUMS_96
#undef BATON_SUMS_80
#undef BATON_SUMS_64
#undef BATON_SUMS_48
#undef BATON_SUMS_32
#undef BATON_SUMS_24
#undef BATON_SUMS_16
#undef BATON_SUMS_8
#undef BATON_EIGHT_SUMS
#undef BATON_SUMS_4
#undef BATON_REGISTERS_128
#undef BATON_REGISTERS_112
#undef BATON_REGISTERS_96
#undef BATON_REGISTERS_80
#undef BATON_REGISTERS_64
#undef BATON_REGISTERS_48
#undef BATON_REGISTERS_32
#undef BATON_REGISTERS_24
#undef BATON_REGISTERS_16
#undef BATON_REGISTERS_8
#undef BATON_REGISTERS_4

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_WGMMA_CUH_
