//! Time encoded in used memory, for measuring how old a reading is when it reaches the end of the path.
//!
//! With `encode_time_in_memory` the library answers, as used bytes, the milliseconds since the Unix epoch at the
//! moment of the call, modulo [`modulus`]: 2^36 (2.2 years) where that fits beneath the usable memory (H100),
//! else the highest power of two that does (2^33, 99 days, on a T4). The number of bytes *is* the number of
//! milliseconds, so any chain that keeps integers below 2^53 exact carries it unchanged.

/// Modulus for a GPU with `usable_bytes` of memory.
#[must_use]
pub const fn modulus(usable_bytes: u64) -> u64 {
    let mut modulus = 1 << 36;
    while modulus > usable_bytes && modulus > 1 {
        modulus >>= 1;
    }
    modulus
}

/// Used bytes that stand for `unix_ms`.
#[must_use]
pub const fn encode(unix_ms: u64, usable_bytes: u64) -> u64 {
    unix_ms % modulus(usable_bytes)
}

/// Time that `used_bytes` stands for: of all candidates, the one nearest to `near_ms` (usually now).
#[must_use]
pub const fn decode(used_bytes: u64, near_ms: u64, usable_bytes: u64) -> u64 {
    let modulus = modulus(usable_bytes);
    let used = used_bytes % modulus;
    let base = near_ms - near_ms % modulus;
    let candidate = base + used;
    if candidate > near_ms && candidate - near_ms > modulus / 2 && candidate >= modulus {
        candidate - modulus
    } else if near_ms > candidate && near_ms - candidate > modulus / 2 {
        candidate + modulus
    } else {
        candidate
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const H100_USABLE: u64 = (81559 - 551) << 20;
    const T4_USABLE: u64 = (15360 - 432) << 20;

    #[test]
    fn the_modulus_fits_beneath_the_memory() {
        assert_eq!(modulus(H100_USABLE), 1 << 36);
        assert_eq!(modulus(T4_USABLE), 1 << 33);
    }

    proptest! {
        #[test]
        fn a_time_comes_back(at in 1_500_000_000_000u64..4_000_000_000_000, age in 0u64..86_400_000, ahead in 0u64..10_000) {
            for usable in [H100_USABLE, T4_USABLE] {
                let used = encode(at, usable);
                prop_assert!(used < usable);
                prop_assert_eq!(decode(used, at + age, usable), at);
                prop_assert_eq!(decode(used, at - ahead, usable), at);
            }
        }
    }
}
