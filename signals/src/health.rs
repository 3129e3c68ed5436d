//! The health score: one number from 0 to 1, and the reasons behind it.
//!
//! `score = product over active reasons of (1 - weight)`. A weight of 1 means "do not use". Weights are judgement,
//! ordered by NVIDIA's own advice: what asks for a reset, reboot or return is worst; what slows a job without
//! corrupting it is mild. Sources: NVIDIA Xid catalogue, NVML recovery action (field 230), row-remapping RMA rule.

/// Why a GPU is not in perfect health: the value of label `reason` of `gpu_health_reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// NVML says the GPU is lost, or its calls do not come back.
    Unreachable,
    /// The driver asks for a GPU reset, a node reboot, or drain and reset.
    RecoveryNeeded,
    /// The driver asks to drain peer-to-peer traffic or to recover the IMEX domain.
    RecoveryPeers,
    /// A memory row could not be remapped: the rule for returning the board.
    RowRemapFailure,
    /// A row remapping waits for a reset.
    RowRemapPending,
    /// Uncorrected ECC errors since the driver was loaded.
    EccUncorrected,
    /// An Xid that points to hardware came within the last hour.
    XidHardware,
    /// At least one NVLink link that should be up is down.
    NvlinkDown,
    /// NVLink errors grew within the last minutes.
    NvlinkErrors,
    /// Hardware slowdown: overheating or a power brake held clocks down for over a tenth of the window.
    HardwareSlowdown,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Self; 10] = [
        Self::Unreachable,
        Self::RecoveryNeeded,
        Self::RecoveryPeers,
        Self::RowRemapFailure,
        Self::RowRemapPending,
        Self::EccUncorrected,
        Self::XidHardware,
        Self::NvlinkDown,
        Self::NvlinkErrors,
        Self::HardwareSlowdown,
    ];

    /// The label value.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::RecoveryNeeded => "recovery-needed",
            Self::RecoveryPeers => "recovery-peers",
            Self::RowRemapFailure => "row-remap-failure",
            Self::RowRemapPending => "row-remap-pending",
            Self::EccUncorrected => "ecc-uncorrected",
            Self::XidHardware => "xid-hardware",
            Self::NvlinkDown => "nvlink-down",
            Self::NvlinkErrors => "nvlink-errors",
            Self::HardwareSlowdown => "hardware-slowdown",
        }
    }

    /// The share of health that this reason takes away, 0 to 1.
    #[must_use]
    pub const fn weight(self) -> f64 {
        match self {
            Self::Unreachable | Self::RecoveryNeeded => 1.0,
            Self::RowRemapFailure => 0.8,
            Self::EccUncorrected | Self::XidHardware | Self::NvlinkDown => 0.5,
            Self::RecoveryPeers => 0.4,
            Self::RowRemapPending => 0.3,
            Self::NvlinkErrors | Self::HardwareSlowdown => 0.2,
        }
    }
}

/// Xids that point to hardware or the driver's link to it, not to an application.
///
/// 48 double-bit ECC, 62 internal micro-controller halt, 63/64 row remapping, 74 NVLink, 79 fallen off the bus,
/// 92 high single-bit rate, 94/95 contained and uncontained ECC, 110 security fault, 119/120 GSP, 140 unrecovered ECC,
/// 143 initialisation. Applications cause 13, 31, 43, 45, 68 and 109.
pub const HARDWARE_XIDS: &[u64] = &[48, 62, 63, 64, 74, 79, 92, 94, 95, 110, 119, 120, 140, 143];

/// Combines active reasons to the score. A reason named twice counts once.
#[must_use]
pub fn score(reasons: &[Reason]) -> f64 {
    Reason::ALL
        .iter()
        .filter(|reason| reasons.contains(reason))
        .fold(1.0, |left, reason| left * (1.0 - reason.weight()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_complaint_is_one_and_unreachable_is_zero() {
        assert!((score(&[]) - 1.0).abs() < 1e-12);
        assert!(score(&[Reason::Unreachable, Reason::NvlinkErrors]).abs() < 1e-12);
    }

    #[test]
    fn more_reasons_never_raise_the_score() {
        for bits in 0_u32..1 << Reason::ALL.len() {
            let active: Vec<_> = Reason::ALL
                .iter()
                .enumerate()
                .filter(|(i, _)| bits >> i & 1 == 1)
                .map(|(_, r)| *r)
                .collect();
            let all = score(&active);
            assert!((0.0..=1.0).contains(&all));
            for extra in Reason::ALL {
                let mut more = active.clone();
                more.push(extra);
                assert!(score(&more) <= all + 1e-12);
            }
        }
    }
}
