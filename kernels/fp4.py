"""E2M1 weights and their block scales: exact decoding, in Triton and as tables.

E2M1 holds sign, two exponent bits and one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
negatives.  Two codes share a byte, the earlier one in the low nibble.  A block scale is UE8M0
(MXFP4: 2^(byte - 127), 255 is NaN) or FP8 E4M3 (NVFP4).  Every product of the two is exact in
bf16: it has at most six significant bits, and bf16 has float32's exponents.

Four codes are read as one int16, low nibble first, because Triton gives 16-bit operands of a dot
the layout of `ldmatrix`: the bytes reach the registers of the lane that multiplies them, and two
codes are decoded with one 32-bit operation each time.  The decoded columns therefore come in the
order (all 4i, all 4i + 1, all 4i + 2, all 4i + 3), and the other operand is stored that way too.
"""

from __future__ import annotations

import triton
import triton.language as tl

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitude of codes 0 to 7; code 8 + i is its negative."""

E4M3_LIFT: tl.constexpr = tl.constexpr(2.0**118)
"""Factor on an E4M3 scale so that it can undo the decoder's 2^-126 within bf16's range."""

E4M3_UNLIFT = 2.0**8
"""What is left to multiply after `E4M3_LIFT`: 2^126 / 2^118."""


@triton.jit
def _e2m1_asm(codes, scale):
    """int16 [R, C] of four codes each -> four bf16 [R, C], times 2^-126 and `scale` [R, C].

    A code's exponent and mantissa land on bf16 bits 8 to 6, which is its value times 2^-126, for
    the subnormal 0.5 too.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, u;
        shl.b32 t, $4, 12; shl.b32 u, $4, 6; and.b32 u, u, 0x01c001c0;
        lop3.b32 t, t, 0x80008000, u, 0xea; mul.bf16x2 $0, t, $5;
        shl.b32 t, $4, 8; shl.b32 u, $4, 2; and.b32 u, u, 0x01c001c0;
        lop3.b32 t, t, 0x80008000, u, 0xea; mul.bf16x2 $1, t, $5;
        shl.b32 t, $4, 4; shr.b32 u, $4, 2; and.b32 u, u, 0x01c001c0;
        lop3.b32 t, t, 0x80008000, u, 0xea; mul.bf16x2 $2, t, $5;
        shr.b32 u, $4, 6; and.b32 u, u, 0x01c001c0;
        lop3.b32 t, $4, 0x80008000, u, 0xea; mul.bf16x2 $3, t, $5;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r",
        [codes, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _e2m1_wide_asm(codes, scale):
    """As `_e2m1_asm`, with 2^126 multiplied back before the scale: right for any scale."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 c, t, u;
        mov.b32 c, 0x7e807e80;
        shl.b32 t, $4, 12; shl.b32 u, $4, 6; and.b32 u, u, 0x01c001c0;
        lop3.b32 t, t, 0x80008000, u, 0xea; mul.bf16x2 t, t, c; mul.bf16x2 $0, t, $5;
        shl.b32 t, $4, 8; shl.b32 u, $4, 2; and.b32 u, u, 0x01c001c0;
        lop3.b32 t, t, 0x80008000, u, 0xea; mul.bf16x2 t, t, c; mul.bf16x2 $1, t, $5;
        shl.b32 t, $4, 4; shr.b32 u, $4, 2; and.b32 u, u, 0x01c001c0;
        lop3.b32 t, t, 0x80008000, u, 0xea; mul.bf16x2 t, t, c; mul.bf16x2 $2, t, $5;
        shr.b32 u, $4, 6; and.b32 u, u, 0x01c001c0;
        lop3.b32 t, $4, 0x80008000, u, 0xea; mul.bf16x2 t, t, c; mul.bf16x2 $3, t, $5;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r",
        [codes, scale],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _e2m1_plain(codes, scale, J: tl.constexpr, WIDE: tl.constexpr):
    """Code J of each int16, as `_e2m1_asm` and `_e2m1_wide_asm` decode it, in Triton's own terms.

    What the interpreter runs, which has no assembler.
    """
    code = (codes.to(tl.int32) >> (4 * J)) & 15
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    value = bits.to(tl.float32, bitcast=True)
    if WIDE:
        value = value * 8.507059173023462e37
    return (value * scale.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def decode_e2m1(codes, scale, WIDE: tl.constexpr, ASM: tl.constexpr):
    """int16 [R, C] and bf16 scales [R, C] -> bf16 [R, 4 C], column c of code j at j C + c.

    WIDE: the scale is the block scale itself.  Otherwise it carries the missing 2^126.
    """
    if ASM:
        if WIDE:
            a, b, c, d = _e2m1_wide_asm(codes, scale)
        else:
            a, b, c, d = _e2m1_asm(codes, scale)
    else:
        a = _e2m1_plain(codes, scale, 0, WIDE)
        b = _e2m1_plain(codes, scale, 1, WIDE)
        c = _e2m1_plain(codes, scale, 2, WIDE)
        d = _e2m1_plain(codes, scale, 3, WIDE)
    joined = tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (0, 3, 2, 1))
    return tl.reshape(joined, (codes.shape[0], 4 * codes.shape[1]))


@triton.jit
def block_scale(byte, E4M3: tl.constexpr, WIDE: tl.constexpr):
    """Scale bytes -> bf16, as `decode_e2m1` wants them.

    E4M3: times `E4M3_LIFT` (never WIDE).  UE8M0: exact for every byte with WIDE; otherwise times
    2^126, for bytes up to 128.
    """
    if E4M3:
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32) * E4M3_LIFT
        return value.to(tl.bfloat16)
    if WIDE:
        # 2^-127 is a subnormal, and so the pattern of 0; 255 needs a mantissa to be a NaN.
        extra = tl.where((byte == 0) | (byte == 255), 0x40, 0).to(tl.int16)
        return ((byte.to(tl.int16) << 7) | extra).to(tl.bfloat16, bitcast=True)
    return ((byte.to(tl.int16) + 126) << 7).to(tl.bfloat16, bitcast=True)
