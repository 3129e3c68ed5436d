//! Field ids of links: NVLink traffic and errors in both generations of counters, C2C.
//!
//! Boards up to NVLink 4 count kibibytes (ids 138 to 141); NVLink 5 counts bytes and packets besides (201 to 250).
//! Traffic is spread evenly over all links, up or down, so that a link that goes down takes nothing back from the
//! others. Errors are reported on link 0.

use nvml_wrapper_sys::bindings::field_id;

use super::fields::Value;
use super::{View, links, supported};
use crate::code::Code;

/// Scope of a link field that asks for the sum of all links.
pub(crate) const ALL_LINKS: u32 = u32::MAX;
/// `nvmlNvlinkVersion_t` from which boards count bytes and packets.
const NVLINK_5: u32 = 7;
const KIB: f64 = 1024.0;
/// Raw NVLink traffic over payload: headers and CRC.
const RAW_OVERHEAD: f64 = 1.125;
/// Payload of a packet, bytes.
const PACKET: f64 = 256.0;

/// Traffic of the links in `scope`, in units of `unit` bytes.
fn traffic(view: &View<'_>, scope: u32, bytes: f64, unit: f64) -> Result<Value, Code> {
    let links = view.profile().nvlink_links();
    if scope == ALL_LINKS && links > 0 {
        return Ok(Value::Counter((bytes / unit) as u64));
    }
    links::link(view, scope)?;
    Ok(Value::Counter((bytes / unit / f64::from(links)) as u64))
}

/// Error total of the links in `scope`, by `nvmlNvLinkErrorCounter_t`.
pub(crate) fn errors(view: &View<'_>, scope: u32, counter: u32) -> Result<Value, Code> {
    links::errors(view, if scope == ALL_LINKS { 0 } else { scope }, counter).map(Value::Long)
}

/// Error total that only NVLink 5 counts.
fn newer_errors(view: &View<'_>, scope: u32, total: u64) -> Result<Value, Code> {
    if scope != ALL_LINKS {
        links::link(view, scope)?;
    }
    Ok(Value::Long(if matches!(scope, 0 | ALL_LINKS) {
        total
    } else {
        0
    }))
}

fn nvlink_5(view: &View<'_>, id: u32, scope: u32) -> Result<Value, Code> {
    supported(links::link(view, 0)?.version >= NVLINK_5)?;
    let integrals = &view.gpu().integrals;
    let totals = &view.gpu().totals.nvlink;
    match id {
        field_id::NVML_FI_DEV_NVLINK_COUNT_XMIT_PACKETS => {
            traffic(view, scope, integrals.nvlink_tx_bytes, PACKET)
        }
        field_id::NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES => traffic(view, scope, integrals.nvlink_tx_bytes, 1.0),
        field_id::NVML_FI_DEV_NVLINK_COUNT_RCV_PACKETS => {
            traffic(view, scope, integrals.nvlink_rx_bytes, PACKET)
        }
        field_id::NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES => traffic(view, scope, integrals.nvlink_rx_bytes, 1.0),
        field_id::NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS => newer_errors(view, scope, totals.crc_flit),
        field_id::NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS => {
            newer_errors(view, scope, totals.replay)
        }
        field_id::NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS => {
            newer_errors(view, scope, totals.recovery)
        }
        field_id::NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS => {
            newer_errors(view, scope, totals.recovery_failed)
        }
        field_id::NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS => {
            newer_errors(view, scope, totals.recovery + totals.recovery_failed)
        }
        field_id::NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS => newer_errors(view, scope, totals.effective),
        field_id::NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS => newer_errors(view, scope, totals.symbol),
        // Drops, bit error rates and the FEC histogram: a clean link.
        _ => newer_errors(view, scope, 0),
    }
}

fn c2c(view: &View<'_>, id: u32, scope: u32) -> Result<Value, Code> {
    let c2c = view.profile().c2c.as_ref().ok_or(Code::NOT_SUPPORTED)?;
    if id == field_id::NVML_FI_DEV_C2C_LINK_COUNT {
        return Ok(Value::Unsigned(c2c.links));
    }
    if scope >= c2c.links {
        return Err(Code::INVALID_ARGUMENT);
    }
    Ok(match id {
        field_id::NVML_FI_DEV_C2C_LINK_GET_STATUS => Value::Unsigned(1),
        field_id::NVML_FI_DEV_C2C_LINK_GET_MAX_BW => Value::Unsigned(c2c.speed_mbps),
        field_id::NVML_FI_DEV_C2C_LINK_POWER_STATE => Value::Unsigned(0),
        _ => Value::Long(0),
    })
}

/// Reads link field `id`; none if it is no link's.
pub(crate) fn read(view: &View<'_>, id: u32, scope: u32) -> Option<Result<Value, Code>> {
    let (load, integrals) = (view.load(), &view.gpu().integrals);
    Some(match id {
        field_id::NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL => errors(view, ALL_LINKS, 2),
        field_id::NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL => errors(view, ALL_LINKS, 3),
        field_id::NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL => errors(view, ALL_LINKS, 0),
        field_id::NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL => errors(view, ALL_LINKS, 1),
        field_id::NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_TOTAL => errors(view, ALL_LINKS, 4),
        field_id::NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY => errors(view, scope, 0),
        field_id::NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY => errors(view, scope, 1),
        field_id::NVML_FI_DEV_NVLINK_ERROR_DL_CRC => errors(view, scope, 2),
        field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON => {
            links::link(view, 0).map(|nvlink| Value::Unsigned(nvlink.speed_mbps))
        }
        field_id::NVML_FI_DEV_NVLINK_LINK_COUNT => {
            links::link(view, 0).map(|nvlink| Value::Unsigned(nvlink.links))
        }
        field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX => {
            traffic(view, scope, integrals.nvlink_tx_bytes, KIB)
        }
        field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX => {
            traffic(view, scope, integrals.nvlink_rx_bytes, KIB)
        }
        field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_TX => {
            traffic(view, scope, integrals.nvlink_tx_bytes * RAW_OVERHEAD, KIB)
        }
        field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_RX => {
            traffic(view, scope, integrals.nvlink_rx_bytes * RAW_OVERHEAD, KIB)
        }
        field_id::NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT => {
            links::link(view, 0).map(|nvlink| Value::Unsigned(if nvlink.switched { nvlink.links } else { 0 }))
        }
        field_id::NVML_FI_DEV_NVLINK_GET_SPEED => links::link(view, scope)
            .map(|nvlink| Value::Unsigned(if load.link_up(scope) { nvlink.speed_mbps } else { 0 })),
        field_id::NVML_FI_DEV_NVLINK_GET_STATE => {
            links::link(view, scope).map(|_| Value::Unsigned(u32::from(load.link_up(scope))))
        }
        field_id::NVML_FI_DEV_NVLINK_GET_VERSION => {
            links::link(view, scope).map(|nvlink| Value::Unsigned(nvlink.version))
        }
        field_id::NVML_FI_DEV_NVLINK_COUNT_XMIT_PACKETS..=field_id::NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER
        | field_id::NVML_FI_DEV_NVLINK_COUNT_FEC_HISTORY_0
            ..=field_id::NVML_FI_DEV_NVLINK_COUNT_FEC_HISTORY_15 => nvlink_5(view, id, scope),
        field_id::NVML_FI_DEV_C2C_LINK_COUNT..=field_id::NVML_FI_DEV_C2C_LINK_GET_MAX_BW
        | field_id::NVML_FI_DEV_C2C_LINK_ERROR_INTR..=field_id::NVML_FI_DEV_C2C_LINK_POWER_STATE => {
            c2c(view, id, scope)
        }
        _ => return None,
    })
}
