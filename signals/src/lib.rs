//! What a measurement is called and what it means.
//!
//! Purpose: the one vocabulary of metric families, labels, units, freshness groups and resource names that the
//! exporter writes, the adapter reads, and dashboards and alerts are checked against.
//! Inputs: none. This crate holds names and pure formulas; values, registries and collection live elsewhere.
//! Invariants: a family name appears once; every family says which reading its age comes from; names and
//! labels follow Prometheus naming (base units, `_total` on counters, ratios from 0 to 1).

mod family;
pub mod gpu;
pub mod health;
pub mod label;
pub mod own;
pub mod pod;
pub mod resource;
pub mod serving;

pub use family::{Family, Group, Kind, MeasuredAt, Unit};

/// Every table of families, with the part that exposes it.
pub const TABLES: &[(&str, &[&Family])] = &[
    ("exporter: devices", gpu::FAMILIES),
    ("exporter: devices in detail", gpu::DETAIL),
    ("exporter: pods", pod::FAMILIES),
    ("exporter: itself", own::EXPORTER),
    ("adapter: itself", own::ADAPTER),
    ("adapter: API server", serving::FAMILIES),
    ("every program", own::PROCESS),
];

/// All families of all programs.
pub fn all() -> impl Iterator<Item = &'static Family> {
    TABLES.iter().flat_map(|(_, families)| families.iter().copied())
}

/// Finds a family by its exposed name.
#[must_use]
pub fn by_name(name: &str) -> Option<&'static Family> {
    all().find(|family| family.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_name_belongs_to_one_family() {
        let names: Vec<_> = all().map(|family| family.name).collect();
        let distinct: BTreeSet<_> = names.iter().collect();
        assert_eq!(names.len(), distinct.len());
    }

    #[test]
    fn names_follow_prometheus_naming() {
        for family in all() {
            assert!(
                family
                    .name
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'),
                "{}",
                family.name
            );
            assert_eq!(
                family.kind == Kind::Counter,
                family.name.ends_with("_total"),
                "{}",
                family.name
            );
            assert_eq!(
                family.kind == Kind::Info,
                family.name.ends_with("_info"),
                "{}",
                family.name
            );
            assert!(
                !family.help.is_empty() && !family.help.ends_with('.'),
                "{}",
                family.name
            );
            if let Some(unit) = family.unit {
                assert!(
                    family.name.trim_end_matches("_total").ends_with(unit.suffix()),
                    "{} should end in {}",
                    family.name,
                    unit.suffix()
                );
            }
        }
    }

    #[test]
    fn device_families_carry_the_identity_labels() {
        for family in gpu::FAMILIES.iter().chain(gpu::DETAIL) {
            assert_eq!(&family.labels[..2], &[label::GPU, label::UUID], "{}", family.name);
        }
    }

    #[test]
    fn by_name_finds_what_the_tables_hold() {
        assert_eq!(by_name("gpu_busy_ratio"), Some(&gpu::BUSY_RATIO));
        assert_eq!(by_name("gpu_nonsense"), None);
    }
}
