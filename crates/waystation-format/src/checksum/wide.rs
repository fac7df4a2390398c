//! CRC-64/NVME 256 bytes at a step, for x86 processors that multiply polynomials in 256-bit registers.
//!
//! The remainder of what was seen so far is kept in sixteen lanes of 128 bits. A step multiplies each lane by
//! x^2048, which carries it past the 256 bytes of the step, and adds these (V. Gopal and others, "Fast CRC
//! Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009). In the end the lanes are
//! folded into one, whose 16 bytes are a message with the same remainder. Bits are reflected, as the
//! algorithm has them: the first bit of a message is its highest power.
//!
//! Invariants: a function here reads whole steps only, and every byte once, so that what it copies and what
//! it checksums are the same bytes, even if somebody else writes to them meanwhile.

use std::arch::x86_64::{
    __m256i, _MM_HINT_T0, _mm_clmulepi64_si128, _mm_prefetch, _mm_set_epi64x, _mm_setzero_si128, _mm_sfence,
    _mm_storeu_si128, _mm_xor_si128, _mm256_castsi256_si128, _mm256_clmulepi64_epi128,
    _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_set_epi64x, _mm256_stream_si256, _mm256_xor_si256,
};

/// Registers that carry the remainder: as many as hide how long a multiplication takes.
const REGISTERS: usize = 8;
/// Bytes of a register.
const REGISTER_BYTES: usize = 32;
/// Bytes of a step.
pub const STEP_BYTES: usize = REGISTERS * REGISTER_BYTES;
/// What targets of [`fold_copying`] are aligned to.
pub const TARGET_ALIGNMENT: usize = REGISTER_BYTES;
/// So far ahead memory is asked for: the processor's own guesses end at each page.
const AHEAD_BYTES: usize = 2048;

/// The polynomial without its highest power, the lowest power in the lowest bit.
const POLYNOMIAL: u64 = 0xad93_d235_94c9_3659;
/// The remainders of single bytes.
static REMAINDERS: [u64; 256] = remainders();

/// Whether this processor has what the functions here need.
pub fn is_supported() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("pclmulqdq")
        && is_x86_feature_detected!("vpclmulqdq")
}

/// The state after `steps` steps from `source`, the state before them being `state`.
///
/// # Safety
/// The processor must be supported. The memory must be readable.
#[target_feature(enable = "avx2,pclmulqdq,vpclmulqdq")]
pub unsafe fn fold(state: u64, source: *const u8, steps: usize) -> u64 {
    // SAFETY: as the caller promises; nothing is copied.
    unsafe { fold_with(state, source, steps, |_, _| {}) }
}

/// The same, and copies the bytes to `target`, past the caches.
///
/// # Safety
/// As for [`fold`]. The target must be aligned to [`TARGET_ALIGNMENT`], writable, and apart from the source.
#[target_feature(enable = "avx2,pclmulqdq,vpclmulqdq")]
pub unsafe fn fold_copying(state: u64, source: *const u8, target: *mut u8, steps: usize) -> u64 {
    // SAFETY: as the caller promises.
    let state = unsafe {
        fold_with(state, source, steps, |offset, bytes| {
            _mm256_stream_si256(target.add(offset).cast(), bytes);
        })
    };
    // Stores past the caches are not ordered with others: who is told of the bytes now must find them.
    _mm_sfence();
    state
}

/// # Safety
/// As for [`fold`]; `store` may be called with every register's offset and bytes.
#[inline]
#[target_feature(enable = "avx2,pclmulqdq,vpclmulqdq")]
unsafe fn fold_with(state: u64, source: *const u8, steps: usize, store: impl Fn(usize, __m256i)) -> u64 {
    if steps == 0 {
        return state;
    }
    let load = |offset: usize| {
        // SAFETY: the caller vouches for whole steps.
        let bytes = unsafe { _mm256_loadu_si256(source.add(offset).cast()) };
        store(offset, bytes);
        bytes
    };
    let mut lanes: [__m256i; REGISTERS] = std::array::from_fn(|register| load(register * REGISTER_BYTES));
    lanes[0] = _mm256_xor_si256(lanes[0], _mm256_set_epi64x(0, 0, 0, state.cast_signed()));
    let (low, high) = const { factors(8 * STEP_BYTES) };
    let factors = _mm256_set_epi64x(high, low, high, low);
    for step in 1..steps {
        for (register, lane) in lanes.iter_mut().enumerate() {
            let offset = step * STEP_BYTES + register * REGISTER_BYTES;
            if register % 2 == 0 {
                _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(offset + AHEAD_BYTES).cast());
            }
            let low = _mm256_clmulepi64_epi128::<0x00>(*lane, factors);
            let high = _mm256_clmulepi64_epi128::<0x11>(*lane, factors);
            *lane = _mm256_xor_si256(_mm256_xor_si256(low, high), load(offset));
        }
    }
    remainder(&lanes)
}

/// The remainder of all lanes, which follow one another.
#[target_feature(enable = "avx2,pclmulqdq,vpclmulqdq")]
fn remainder(lanes: &[__m256i; REGISTERS]) -> u64 {
    let (low, high) = const { factors(128) };
    let factors = _mm_set_epi64x(high, low);
    let mut sum = _mm_setzero_si128();
    for lane in lanes {
        for half in [_mm256_castsi256_si128(*lane), _mm256_extracti128_si256::<1>(*lane)] {
            let low = _mm_clmulepi64_si128::<0x00>(sum, factors);
            let high = _mm_clmulepi64_si128::<0x11>(sum, factors);
            sum = _mm_xor_si128(_mm_xor_si128(low, high), half);
        }
    }
    let mut message = [0u8; 16];
    // SAFETY: the message is as long as the lane.
    unsafe { _mm_storeu_si128(message.as_mut_ptr().cast(), sum) };
    message.iter().fold(0, |state, byte| REMAINDERS[usize::from(state as u8 ^ byte)] ^ (state >> 8))
}

/// What the lower and the upper half of a lane are multiplied by to carry them `bits` on. A product of two
/// reflected numbers comes out one bit low, which is why the powers are one less.
const fn factors(bits: usize) -> (i64, i64) {
    (power(bits + 63).cast_signed(), power(bits - 1).cast_signed())
}

/// x^`exponent` modulo the polynomial, reflected.
const fn power(exponent: usize) -> u64 {
    let mut value: u64 = 1;
    let mut done = 0;
    while done < exponent {
        value = (value << 1) ^ if value >> 63 == 1 { POLYNOMIAL } else { 0 };
        done += 1;
    }
    value.reverse_bits()
}

const fn remainders() -> [u64; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < table.len() {
        let mut value = byte as u64;
        let mut bit = 0;
        while bit < 8 {
            value = (value >> 1) ^ if value & 1 == 1 { POLYNOMIAL.reverse_bits() } else { 0 };
            bit += 1;
        }
        table[byte] = value;
        byte += 1;
    }
    table
}
