//! Families that the programs expose about themselves.

use crate::family::{Family, Kind, MeasuredAt, Unit};

const fn own(
    name: &'static str,
    kind: Kind,
    unit: Option<Unit>,
    labels: &'static [&'static str],
    help: &'static str,
) -> Family {
    Family {
        name,
        help,
        kind,
        unit,
        labels,
        measured: MeasuredAt::Now,
    }
}

/// Version of the running program.
pub const BUILD_INFO: Family = own(
    "forewarm_build_info",
    Kind::Info,
    None,
    &["version", "program"],
    "Version of the running program",
);

/// Every program.
pub const PROCESS: &[&Family] = &[&BUILD_INFO];
/// The exporter.
pub const EXPORTER: &[&Family] = &[];
/// The adapter.
pub const ADAPTER: &[&Family] = &[];
