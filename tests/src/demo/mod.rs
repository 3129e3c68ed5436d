//! The demo.

pub mod args;
pub mod install;
pub mod judge;
pub mod observe;
pub mod page;
pub mod picture;
pub mod reading;
pub mod story;
pub mod terminal;
pub mod view;
pub mod wishes;
