//! Gives the cdylib the soname every NVML client asks for, so that a copy under that name is the same library
//! to the dynamic linker.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
}
