//! Arrays of texts, taken apart.

use pgrx::pg_sys;

/// The texts of an array; none is null. They lie in the memory in force, or in the array.
///
/// # Safety
/// The datum is a text[].
pub(super) unsafe fn texts(datum: pg_sys::Datum) -> Vec<Option<pg_sys::Datum>> {
    let mut values = std::ptr::null_mut();
    let mut nulls = std::ptr::null_mut();
    let mut count = 0;
    // SAFETY: as the caller promises; the arrays that are made are as long as is said.
    unsafe {
        let array = pg_sys::pg_detoast_datum(datum.cast_mut_ptr()).cast::<pg_sys::ArrayType>();
        pg_sys::deconstruct_array(
            array,
            pg_sys::TEXTOID,
            -1,
            false,
            b'i' as std::ffi::c_char,
            &raw mut values,
            &raw mut nulls,
            &raw mut count,
        );
        (0..usize::try_from(count).unwrap_or(0))
            .map(|index| (!*nulls.add(index)).then(|| *values.add(index)))
            .collect()
    }
}
