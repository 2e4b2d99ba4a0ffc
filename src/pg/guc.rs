//! Settings that are texts with a form of their own: what does not have it is refused when it is set, and not found out later.

use std::ffi::{CStr, CString, c_char, c_void};

use pgrx::pg_sys;
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};

/// The form of a setting.
pub(crate) trait Form {
    fn fits(text: &str) -> bool;
}

/// Defines a setting of that form.
pub(crate) fn define<F: Form>(
    name: &'static CStr,
    about: &'static CStr,
    more: &'static CStr,
    setting: &'static GucSetting<Option<CString>>,
    context: GucContext,
) {
    let flags = GucFlags::default();
    let check: pg_sys::GucStringCheckHook = Some(check::<F>);
    // SAFETY: the hook keeps to what is said of such hooks: it changes nothing and raises nothing.
    unsafe {
        GucRegistry::define_string_guc_with_hooks(
            name, about, more, setting, context, flags, check, None, None,
        );
    }
}

/// Called by Postgres with each new value.
unsafe extern "C-unwind" fn check<F: Form>(
    value: *mut *mut c_char,
    _extra: *mut *mut c_void,
    _source: pg_sys::GucSource::Type,
) -> bool {
    // SAFETY: the pointer is valid, and points to null or to a text that ends with a zero byte.
    let text = unsafe {
        let text = *value;
        (!text.is_null()).then(|| CStr::from_ptr(text))
    };
    // The database may have another encoding; no form is one of letters that would be lost here.
    text.is_none_or(|text| F::fits(&text.to_string_lossy()))
}
