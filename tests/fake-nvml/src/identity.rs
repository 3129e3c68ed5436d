//! Names of the fake's GPUs as pure functions, so that a test knows them without asking the library.
//!
//! - UUID: two splitmix64 outputs seeded with FNV-1a(seed) + index, printed as a version 4 UUID behind `GPU-`.
//! - PCI bus: domain 0, bus `(0x18 + 11 × index) mod 256`, device 0 (11 is odd, so 256 indices stay distinct).
//! - Serial: thirteen decimal digits from the same stream as the UUID.

fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// One step of splitmix64.
pub(crate) fn splitmix64(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn stream(seed: &str, index: u32) -> u64 {
    splitmix64(fnv1a(seed).wrapping_add(u64::from(index)))
}

/// UUID of GPU `index` of a fake seeded with `seed` (`FAKE_NVML_UUID_SEED`), in the form `GPU-8-4-4-4-12`.
#[must_use]
pub fn gpu_uuid(seed: &str, index: u32) -> String {
    let high = stream(seed, index);
    let low = splitmix64(high);
    format!(
        "GPU-{:08x}-{:04x}-4{:03x}-{:04x}-{:012x}",
        high >> 32,
        (high >> 16) & 0xffff,
        high & 0xfff,
        0x8000 | ((low >> 48) & 0x3fff),
        low & 0xffff_ffff_ffff
    )
}

/// PCI bus number of GPU `index`.
#[must_use]
pub const fn pci_bus(index: u32) -> u32 {
    (0x18 + 11 * index) % 256
}

/// PCI bus id of GPU `index` in NVML's long form, for example `00000000:18:00.0`.
#[must_use]
pub fn pci_bus_id(index: u32) -> String {
    format!("00000000:{:02X}:00.0", pci_bus(index))
}

/// Board serial number of GPU `index`.
#[must_use]
pub fn serial(seed: &str, index: u32) -> String {
    format!("{:013}", stream(seed, index) % 10_000_000_000_000)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn uuids_are_stable_and_differ_by_seed_and_index() {
        // Pinned: recordings and dashboards of tests rely on these exact names.
        assert_eq!(
            gpu_uuid("forewarm", 0),
            "GPU-b5e0a0bc-8e6b-44c2-9c51-6b6ec0a6d593"
        );
        let seen: BTreeSet<String> = ["a", "b", "node-1", "node-2"]
            .iter()
            .flat_map(|seed| (0..64).map(move |index| gpu_uuid(seed, index)))
            .collect();
        assert_eq!(seen.len(), 4 * 64);
        assert!(
            seen.iter()
                .all(|uuid| uuid.len() == 40 && uuid.as_bytes()[18] == b'4'),
            "{seen:?}"
        );
    }

    #[test]
    fn bus_ids_are_distinct() {
        let seen: BTreeSet<String> = (0..64).map(pci_bus_id).collect();
        assert_eq!(seen.len(), 64);
        assert_eq!(pci_bus_id(0), "00000000:18:00.0");
    }
}
