//! A metric family: name, meaning, type, unit, labels, and which reading its age comes from.

/// One metric family as exposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Family {
    /// Exposed name, with the unit and `_total` suffixes.
    pub name: &'static str,
    /// One line for `# HELP`, without a final stop.
    pub help: &'static str,
    /// Exposition type.
    pub kind: Kind,
    /// Base unit, where the quantity has one.
    pub unit: Option<Unit>,
    /// Label keys in the order they are written.
    pub labels: &'static [&'static str],
    /// Which age line tells when a value of this family was measured.
    pub measured: MeasuredAt,
}

/// Exposition type of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A value that goes up and down.
    Gauge,
    /// A value that only grows until its source restarts; the name ends in `_total`.
    Counter,
    /// Constant labels with value 1; the name ends in `_info`.
    Info,
    /// Cumulative buckets.
    Histogram,
}

impl Kind {
    /// The word after `# TYPE name` in the Prometheus text format 0.0.4, which has no info type.
    #[must_use]
    pub const fn text_type(self) -> &'static str {
        match self {
            Self::Gauge | Self::Info => "gauge",
            Self::Counter => "counter",
            Self::Histogram => "histogram",
        }
    }

    /// The word after `# TYPE name` in OpenMetrics 1.0.
    #[must_use]
    pub const fn openmetrics_type(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Info => "info",
            Self::Counter => "counter",
            Self::Histogram => "histogram",
        }
    }
}

/// Base units of exposed quantities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unit {
    /// Share from 0 to 1.
    Ratio,
    /// Bytes.
    Bytes,
    /// Bytes each second.
    BytesPerSecond,
    /// Seconds.
    Seconds,
    /// Watts.
    Watts,
    /// Joules.
    Joules,
    /// Degrees Celsius.
    Celsius,
    /// Hertz.
    Hertz,
}

impl Unit {
    /// The name suffix that states this unit, without the leading underscore.
    #[must_use]
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::Ratio => "ratio",
            Self::Bytes => "bytes",
            Self::BytesPerSecond => "bytes_per_second",
            Self::Seconds => "seconds",
            Self::Watts => "watts",
            Self::Joules => "joules",
            Self::Celsius => "celsius",
            Self::Hertz => "hertz",
        }
    }
}

/// Device readings that are taken together and so share one age.
///
/// The value of label `group` of `gpu_sample_age_seconds`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Group {
    /// NVML utilisation rates.
    Utilization,
    /// GPU performance monitoring (Hopper and newer).
    Gpm,
    /// Device memory.
    Memory,
    /// NVLink traffic, all links.
    Nvlink,
    /// NVLink link states and errors, read link by link and so less often.
    Links,
    /// PCIe counters.
    Pcie,
    /// Power and energy.
    Power,
    /// Temperatures.
    Thermal,
    /// Clocks and throttle times.
    Clocks,
    /// ECC counters and remapped rows.
    Ecc,
    /// Recovery action, fabric state, health score.
    Health,
}

impl Group {
    /// Every group, in the order age lines are written.
    pub const ALL: [Self; 11] = [
        Self::Utilization,
        Self::Gpm,
        Self::Memory,
        Self::Nvlink,
        Self::Links,
        Self::Pcie,
        Self::Power,
        Self::Thermal,
        Self::Clocks,
        Self::Ecc,
        Self::Health,
    ];

    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Utilization => "utilization",
            Self::Gpm => "gpm",
            Self::Memory => "memory",
            Self::Nvlink => "nvlink",
            Self::Links => "links",
            Self::Pcie => "pcie",
            Self::Power => "power",
            Self::Thermal => "thermal",
            Self::Clocks => "clocks",
            Self::Ecc => "ecc",
            Self::Health => "health",
        }
    }
}

/// How a reader learns when a value was measured: arrival time minus the age line named here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MeasuredAt {
    /// `gpu_sample_age_seconds{uuid,group}` of the same device.
    Device(Group),
    /// `gpu_pod_sample_age_seconds{pod_uid,source}` of the same pod and source.
    Pod,
    /// True at the moment of the response: states, inventories, ages and the programs' own counters.
    Now,
}
