//! Where this copy of the library was loaded from.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// `Dl_info` of glibc's `dlfcn.h`.
#[repr(C)]
struct DlInfo {
    file_name: *const c_char,
    file_base: *mut c_void,
    symbol_name: *const c_char,
    symbol_address: *mut c_void,
}

unsafe extern "C" {
    fn dladdr(address: *const c_void, info: *mut DlInfo) -> c_int;
}

/// Marks an address inside this object.
static ANCHOR: u8 = 0;

/// Folder of the shared object (or program) that holds this code; none if the loader does not know it.
pub(crate) fn folder() -> Option<PathBuf> {
    let mut info = DlInfo {
        file_name: std::ptr::null(),
        file_base: std::ptr::null_mut(),
        symbol_name: std::ptr::null(),
        symbol_address: std::ptr::null_mut(),
    };
    // SAFETY: `info` is a valid, writable Dl_info and dladdr only reads the address's value.
    let found = unsafe { dladdr((&raw const ANCHOR).cast(), &raw mut info) } != 0;
    if !found || info.file_name.is_null() {
        return None;
    }
    // SAFETY: dladdr succeeded, so the name is NUL-terminated and lives as long as the object is loaded: as this code.
    let name = unsafe { CStr::from_ptr(info.file_name) };
    Path::new(OsStr::from_bytes(name.to_bytes()))
        .parent()
        .map(Path::to_owned)
}
