//! Memory errors and their repair, and the PCIe link.

use std::ffi::{c_uint, c_ulonglong};
use std::time::Duration;

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlEccCounterType_t, nvmlEccErrorCounts_t, nvmlEccSramErrorStatus_t, nvmlEnableState_t,
    nvmlMemoryErrorType_t, nvmlMemoryLocation_t, nvmlPageRetirementCause_t, nvmlPcieUtilCounter_t,
    nvmlReturn_t, nvmlRowRemapperHistogramValues_t,
};

use super::{View, device_call, expect_version, put, put_list, supported, version_word};
use crate::code::Code;
use crate::gate;

/// The real library measures the bus for so long, per direction.
const PCIE_WINDOW: Duration = Duration::from_millis(20);
/// Row groups of a Hopper board, for the spare-row histogram.
const ROW_BANKS: u32 = 2560;

const CORRECTED: nvmlMemoryErrorType_t = 0;
const UNCORRECTED: nvmlMemoryErrorType_t = 1;
const VOLATILE: nvmlEccCounterType_t = 0;
const AGGREGATE: nvmlEccCounterType_t = 1;
const LOCATION_DRAM: nvmlMemoryLocation_t = 2;
const LOCATION_SRAM: nvmlMemoryLocation_t = 7;
/// Locations are numbered below this.
const LOCATION_END: nvmlMemoryLocation_t = 9;

/// ECC total by error type; the fake starts with the driver, so volatile and aggregate counts agree.
pub(crate) fn ecc_total(view: &View<'_>, uncorrected: bool) -> Result<u64, Code> {
    supported(view.profile().ecc.supported)?;
    let ecc = &view.gpu().totals.ecc;
    Ok(if uncorrected {
        ecc.uncorrected
    } else {
        ecc.corrected
    })
}

fn ecc_checked(
    view: &View<'_>,
    kind: nvmlMemoryErrorType_t,
    counter: nvmlEccCounterType_t,
) -> Result<u64, Code> {
    match (kind, counter) {
        (CORRECTED | UNCORRECTED, VOLATILE | AGGREGATE) => ecc_total(view, kind == UNCORRECTED),
        _ => Err(Code::INVALID_ARGUMENT),
    }
}

/// Addresses of retired pages by cause: made up, distinct, aligned to 64 KiB.
fn retired(view: &View<'_>, cause: nvmlPageRetirementCause_t) -> Result<Vec<u64>, Code> {
    supported(view.profile().ecc.retired_pages)?;
    let pages = &view.gpu().totals.retired;
    let (count, base) = match cause {
        0 => (pages.single_bit, 0x1000_0000),
        1 => (pages.double_bit, 0x2000_0000),
        _ => return Err(Code::INVALID_ARGUMENT),
    };
    Ok((0..u64::from(count)).map(|nth| base + (nth << 16)).collect())
}

device_call! {
    nvmlDeviceGetEccMode(current: *mut nvmlEnableState_t, pending: *mut nvmlEnableState_t) |view| {
        supported(view.profile().ecc.supported)?;
        put(current, 1)?;
        put(pending, 1)
    };
    nvmlDeviceGetDefaultEccMode(mode: *mut nvmlEnableState_t) |view| {
        supported(view.profile().ecc.supported)?;
        put(mode, 1)
    };
    nvmlDeviceGetTotalEccErrors(
        kind: nvmlMemoryErrorType_t, counter: nvmlEccCounterType_t, count: *mut c_ulonglong,
    ) |view| put(count, view.long(ecc_checked(view, kind, counter)?));
    nvmlDeviceGetMemoryErrorCounter(
        kind: nvmlMemoryErrorType_t, counter: nvmlEccCounterType_t, location: nvmlMemoryLocation_t,
        count: *mut c_ulonglong,
    ) |view| {
        let total = ecc_checked(view, kind, counter)?;
        if location >= LOCATION_END {
            return Err(Code::INVALID_ARGUMENT);
        }
        let ecc = &view.gpu().totals.ecc;
        let in_sram = if kind == UNCORRECTED { ecc.sram_uncorrected } else { ecc.sram_corrected };
        // A MIG device has errors of its own, of which none happened.
        put(count, match location {
            _ if view.mig.is_some() => 0,
            LOCATION_DRAM => view.long(total.saturating_sub(in_sram)),
            LOCATION_SRAM => view.long(in_sram),
            _ => 0,
        })
    };
    nvmlDeviceGetDetailedEccErrors(
        kind: nvmlMemoryErrorType_t, counter: nvmlEccCounterType_t, counts: *mut nvmlEccErrorCounts_t,
    ) |view| put(counts, nvmlEccErrorCounts_t {
        l1Cache: 0,
        l2Cache: 0,
        deviceMemory: view.long(ecc_checked(view, kind, counter)?),
        registerFile: 0,
    });
    nvmlDeviceGetSramEccErrorStatus(status: *mut nvmlEccSramErrorStatus_t) |view| {
        expect_version(status, 1)?;
        supported(view.profile().ecc.sram_status)?;
        let ecc = &view.gpu().totals.ecc;
        let exceeded = ecc.sram_threshold_exceeded;
        // Past the threshold there was at least one.
        let uncorrected = ecc.sram_uncorrected.max(u64::from(exceeded));
        let corrected = ecc.sram_corrected;
        put(status, nvmlEccSramErrorStatus_t {
            version: version_word::<nvmlEccSramErrorStatus_t>(1),
            aggregateUncParity: 0,
            aggregateUncSecDed: uncorrected,
            aggregateCor: corrected,
            volatileUncParity: 0,
            volatileUncSecDed: uncorrected,
            volatileCor: corrected,
            aggregateUncBucketL2: 0,
            aggregateUncBucketSm: uncorrected,
            aggregateUncBucketPcie: 0,
            aggregateUncBucketMcu: 0,
            aggregateUncBucketOther: 0,
            bThresholdExceeded: u32::from(exceeded),
        })
    };
    nvmlDeviceGetRemappedRows(
        correctable: *mut c_uint, uncorrectable: *mut c_uint, pending: *mut c_uint, failure: *mut c_uint,
    ) |view| {
        supported(view.profile().ecc.row_remapping)?;
        let rows = view.gpu().totals.remapped.clone();
        put(correctable, view.int(rows.correctable))?;
        put(uncorrectable, view.int(rows.uncorrectable))?;
        put(pending, u32::from(rows.pending))?;
        put(failure, u32::from(rows.failure))
    };
    nvmlDeviceGetRowRemapperHistogram(values: *mut nvmlRowRemapperHistogramValues_t) |view| {
        supported(view.profile().ecc.row_remapping)?;
        let rows = &view.gpu().totals.remapped;
        let touched = (rows.correctable + rows.uncorrectable).min(ROW_BANKS);
        let none = u32::from(rows.failure);
        put(values, nvmlRowRemapperHistogramValues_t {
            max: (ROW_BANKS - touched).saturating_sub(none),
            high: touched,
            partial: 0,
            low: 0,
            none,
        })
    };
    nvmlDeviceGetRetiredPages_v2(
        cause: nvmlPageRetirementCause_t, count: *mut c_uint, addresses: *mut c_ulonglong,
        timestamps: *mut c_ulonglong,
    ) |view| {
        let pages = retired(view, cause)?;
        let capacity = if count.is_null() { 0 } else { count.read() };
        put_list(addresses, count, &pages)?;
        if !timestamps.is_null() {
            count.write(capacity);
            put_list(timestamps, count, &vec![view.state.now_us; pages.len()])?;
        }
        Ok(())
    };
    nvmlDeviceGetRetiredPages(
        cause: nvmlPageRetirementCause_t, count: *mut c_uint, addresses: *mut c_ulonglong,
    ) |view| put_list(addresses, count, &retired(view, cause)?);
    nvmlDeviceGetRetiredPagesPendingStatus(pending: *mut nvmlEnableState_t) |view| {
        supported(view.profile().ecc.retired_pages)?;
        put(pending, u32::from(view.gpu().totals.retired.pending))
    };
    nvmlDeviceGetPcieReplayCounter(count: *mut c_uint) |view|
        put(count, view.int(view.gpu().totals.pcie_replays as u32));
    nvmlDeviceGetCurrPcieLinkGeneration(generation: *mut c_uint) |view|
        put(generation, view.profile().pcie.generation);
    nvmlDeviceGetMaxPcieLinkGeneration(generation: *mut c_uint) |view|
        put(generation, view.profile().pcie.generation);
    nvmlDeviceGetGpuMaxPcieLinkGeneration(generation: *mut c_uint) |view|
        put(generation, view.profile().pcie.generation);
    nvmlDeviceGetCurrPcieLinkWidth(width: *mut c_uint) |view| put(width, view.profile().pcie.width);
    nvmlDeviceGetMaxPcieLinkWidth(width: *mut c_uint) |view| put(width, view.profile().pcie.width);
    // 2.5 GT/s doubles by generation; the next two count in the header's steps and MB/s per lane.
    nvmlDeviceGetPcieLinkMaxSpeed(speed: *mut c_uint) |view| put(speed, view.profile().pcie.generation);
    nvmlDeviceGetPcieSpeed(speed: *mut c_uint) |view| put(speed, 2500 << view.profile().pcie.generation.saturating_sub(1));
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPcieThroughput(
    device: nvmlDevice_t,
    counter: nvmlPcieUtilCounter_t,
    value: *mut c_uint,
) -> nvmlReturn_t {
    let code = super::about_device("nvmlDeviceGetPcieThroughput", device, |view| {
        let rate = match counter {
            0 => view.load().pcie_tx,
            1 => view.load().pcie_rx,
            _ => return Err(Code::INVALID_ARGUMENT),
        };
        // SAFETY: a non-null pointer is valid by NVML's contract.
        unsafe { put(value, view.int((rate / 1024.0) as u32)) }
    });
    if code == 0 {
        super::guard(|| {
            gate::sleep(PCIE_WINDOW);
            Ok(())
        })
    } else {
        code
    }
}
