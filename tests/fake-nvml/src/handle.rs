//! Handles: what an opaque pointer of a client stands for.
//!
//! Every GPU, MIG device, GPU instance and compute instance that can ever exist has a slot in one static table, and
//! its handle is the address of that slot. Invariants: handles are never null and never followed; a pointer that is
//! not exactly the address of a slot stands for nothing. Whether the thing exists now is for the state to say.

use std::ffi::c_void;

use crate::settings::MAX_GPUS;

/// MIG devices of a GPU at most.
pub(crate) const MIG_DEVICES: u32 = 7;
/// GPU instance ids of a GPU: 0 to 14 exist.
const INSTANCES: u32 = 16;

const GPUS: usize = MAX_GPUS as usize;
const MIG_FIRST: usize = GPUS;
const INSTANCE_FIRST: usize = MIG_FIRST + GPUS * MIG_DEVICES as usize;
const SLOT_COUNT: usize = INSTANCE_FIRST + GPUS * INSTANCES as usize;

/// Slots that handles point at. Only their addresses matter.
static SLOTS: [u64; SLOT_COUNT] = [0; SLOT_COUNT];

/// What a handle stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Handle {
    /// A GPU, by its place in the node.
    Gpu(usize),
    /// A MIG device of a GPU, by its MIG index.
    Mig(usize, u32),
    /// A GPU instance of a GPU, by its id.
    Instance(usize, u32),
}

impl Handle {
    /// The pointer that clients hold; null for what has no slot.
    pub(crate) fn pointer<T>(self) -> *mut T {
        let slot = match self {
            Self::Gpu(at) if at < GPUS => at,
            Self::Mig(at, index) if at < GPUS && index < MIG_DEVICES => {
                MIG_FIRST + at * MIG_DEVICES as usize + index as usize
            }
            Self::Instance(at, id) if at < GPUS && id < INSTANCES => {
                INSTANCE_FIRST + at * INSTANCES as usize + id as usize
            }
            _ => return std::ptr::null_mut(),
        };
        std::ptr::from_ref(&SLOTS[slot])
            .cast_mut()
            .cast::<c_void>()
            .cast()
    }

    /// What `pointer` stands for.
    pub(crate) fn of<T>(pointer: *mut T) -> Option<Self> {
        let offset = pointer.addr().checked_sub(SLOTS.as_ptr().addr())?;
        if !offset.is_multiple_of(size_of::<u64>()) {
            return None;
        }
        let part = |slot: usize, each: u32| (slot / each as usize, slot as u32 % each);
        match offset / size_of::<u64>() {
            slot if slot < MIG_FIRST => Some(Self::Gpu(slot)),
            slot if slot < INSTANCE_FIRST => {
                let (at, index) = part(slot - MIG_FIRST, MIG_DEVICES);
                Some(Self::Mig(at, index))
            }
            slot if slot < SLOT_COUNT => {
                let (at, id) = part(slot - INSTANCE_FIRST, INSTANCES);
                Some(Self::Instance(at, id))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_stands_for_one_thing_only() {
        let all = [0, 7, 63].into_iter().flat_map(|at| {
            std::iter::once(Handle::Gpu(at))
                .chain((0..MIG_DEVICES).map(move |index| Handle::Mig(at, index)))
                .chain((0..INSTANCES).map(move |id| Handle::Instance(at, id)))
        });
        for handle in all {
            let pointer = handle.pointer::<u8>();
            assert!(!pointer.is_null());
            assert_eq!(Handle::of(pointer), Some(handle));
            assert_eq!(Handle::of(pointer.wrapping_add(1)), None);
        }
        assert!(Handle::Gpu(64).pointer::<u8>().is_null());
        assert!(Handle::Mig(0, 7).pointer::<u8>().is_null());
        assert_eq!(Handle::of(std::ptr::null_mut::<u8>()), None);
        let beyond = Handle::Instance(63, 15).pointer::<u64>().wrapping_add(1);
        assert_eq!(Handle::of(beyond), None);
    }
}
