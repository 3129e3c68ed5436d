//! Errors a GPU has counted and what its memory repair did, as the control file tells them.
//!
//! All are totals since driver load: the library keeps the highest one seen. Flags follow the file.

use serde::{Deserialize, Serialize};

/// NVLink error totals since driver load.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NvlinkErrors {
    /// Data link replays.
    pub replay: u64,
    /// Link recoveries.
    pub recovery: u64,
    /// CRC errors in flits.
    pub crc_flit: u64,
    /// CRC errors in data.
    pub crc_data: u64,
    /// ECC errors in data.
    pub ecc_data: u64,
    /// Link recoveries that failed (NVLink 5).
    pub recovery_failed: u64,
    /// Effective errors: those that error correction left (NVLink 5).
    pub effective: u64,
    /// Symbol errors (NVLink 5).
    pub symbol: u64,
}

/// ECC error totals since driver load.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EccErrors {
    /// Corrected errors.
    pub corrected: u64,
    /// Uncorrected errors.
    pub uncorrected: u64,
    /// Corrected errors that are in SRAM, part of the above; the rest is in DRAM.
    pub sram_corrected: u64,
    /// Uncorrected errors that are in SRAM, part of the above; the rest is in DRAM.
    pub sram_uncorrected: u64,
    /// The SRAM threshold flag is raised.
    pub sram_threshold_exceeded: bool,
}

/// Row remapping state.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RemappedRows {
    /// Rows remapped after correctable errors.
    pub correctable: u32,
    /// Rows remapped after uncorrectable errors.
    pub uncorrectable: u32,
    /// A remapping waits for a reset.
    pub pending: bool,
    /// A remapping failed: the bank has no spare rows.
    pub failure: bool,
}

/// Page retirement state.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetiredPages {
    /// Pages retired for repeated single-bit errors.
    pub single_bit: u32,
    /// Pages retired for a double-bit error.
    pub double_bit: u32,
    /// A retirement waits for a reset.
    pub pending: bool,
}
