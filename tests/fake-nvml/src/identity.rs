//! Names of the fake's GPUs as pure functions, so that a test knows them without asking the library.
//!
//! - UUID: two splitmix64 outputs seeded with FNV-1a(seed) + index, printed as a version 4 UUID behind `GPU-`.
//! - MIG UUID: the same from FNV-1a(GPU UUID) + ids, printed as version 5 behind `MIG-`.
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

/// UUID of the MIG device with GPU instance `gi` and compute instance `ci` on the GPU named `gpu_uuid`, from R470 on.
///
/// As with the real driver, the same ids on the same GPU make the same UUID, whatever the profile.
#[must_use]
pub fn mig_uuid(gpu_uuid: &str, gi: u32, ci: u32) -> String {
    let high = splitmix64(fnv1a(gpu_uuid).wrapping_add(u64::from(gi) << 8 | u64::from(ci)));
    let low = splitmix64(high);
    format!(
        "MIG-{:08x}-{:04x}-5{:03x}-{:04x}-{:012x}",
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
    fn mig_uuids_belong_to_their_gpu_and_ids() {
        let gpu = gpu_uuid("forewarm", 0);
        let seen: BTreeSet<String> = [&gpu, &gpu_uuid("forewarm", 1)]
            .iter()
            .flat_map(|gpu| (0..15).flat_map(move |gi| (0..8).map(move |ci| mig_uuid(gpu, gi, ci))))
            .collect();
        assert_eq!(seen.len(), 2 * 15 * 8);
        assert!(
            seen.iter()
                .all(|uuid| uuid.starts_with("MIG-") && uuid.len() == 40)
        );
        assert_eq!(mig_uuid(&gpu, 7, 0), mig_uuid(&gpu, 7, 0));
    }

    #[test]
    fn bus_ids_are_distinct() {
        let seen: BTreeSet<String> = (0..64).map(pci_bus_id).collect();
        assert_eq!(seen.len(), 64);
        assert_eq!(pci_bus_id(0), "00000000:18:00.0");
    }
}
