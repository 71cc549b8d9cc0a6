//! Tables of functions of a library.

use super::LibraryError;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::path::Path;

/// Loads a library and keeps it until the process ends: unloading NVIDIA's libraries is not safe while threads of theirs
/// exist.
///
/// # Errors
/// [`LibraryError::Unloadable`].
pub(super) fn preload(path: &Path) -> Result<&'static Library, LibraryError> {
    // SAFETY: initialisers of NVIDIA's libraries have no preconditions.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    let unloadable = |e: libloading::Error| LibraryError::Unloadable { path: path.to_owned(), reason: e.to_string() };
    library.map(|library| &*Box::leak(Box::new(library))).map_err(unloadable)
}

/// Declares a table of functions with their C names and signatures; those after `optional` may be missing in older
/// libraries.
macro_rules! functions {
    (
        $(#[$doc:meta])* $table:ident { $( fn $name:ident( $($arg:ty),* $(,)? ) -> $result:ty; )* }
        $( optional { $( fn $maybe:ident( $($maybe_arg:ty),* $(,)? ) -> $maybe_result:ty; )* } )?
    ) => {
        $(#[$doc])*
        #[allow(non_snake_case)] // The names of the C functions.
        pub(crate) struct $table {
            /// The file.
            pub(crate) path: std::path::PathBuf,
            $( pub(crate) $name: unsafe extern "C" fn($($arg),*) -> $result, )*
            $( $( pub(crate) $maybe: Option<unsafe extern "C" fn($($maybe_arg),*) -> $maybe_result>, )* )?
        }

        impl std::fmt::Debug for $table {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($table)).field("path", &self.path).finish_non_exhaustive()
            }
        }

        impl $table {
            /// Loads the library for the lifetime of the process.
            ///
            /// # Errors
            /// When it cannot be loaded, or lacks a function.
            pub(crate) fn load(path: std::path::PathBuf) -> Result<&'static $table, $crate::library::LibraryError> {
                let library = $crate::library::binding::preload(&path)?;
                let table = $table {
                    $( $name: {
                        let symbol = concat!(stringify!($name), "\0");
                        // SAFETY: the signature is that of the library's header.
                        let found = unsafe { library.get(symbol.as_bytes()) };
                        let missing = |_| $crate::library::LibraryError::Symbol { path: path.clone(), symbol: stringify!($name) };
                        *found.map_err(missing)?
                    }, )*
                    $( $( $maybe: {
                        let symbol = concat!(stringify!($maybe), "\0");
                        // SAFETY: the signature is that of the library's header.
                        unsafe { library.get(symbol.as_bytes()) }.ok().map(|found| *found)
                    }, )* )?
                    path,
                };
                Ok(Box::leak(Box::new(table)))
            }
        }
    };
}
pub(super) use functions;
