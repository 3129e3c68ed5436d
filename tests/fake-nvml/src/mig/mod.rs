//! MIG: how a GPU is cut into GPU instances, compute instances and the MIG devices that clients see.
//!
//! Inputs: the profile's table of instance profiles and what the control file says about this GPU. The result is an
//! immutable [`Layout`]; the control replaces it whole, also between two calls of one client.

mod calls;
mod control;
mod layout;
mod table;

pub(crate) use calls::answered;
pub use control::{MigControl, MigDeviceControl};
pub(crate) use layout::{Device, Instance, Layout};
pub use table::MigProfile;
