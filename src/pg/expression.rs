//! Whether a text that a user supplied is one SQL expression: it is put into statements of our own.

use std::ffi::CString;

use pgrx::pg_sys;

use super::encoding;
use super::error::Complaint;

/// Checks that a text is one SQL expression, and so stays one wherever it is put between brackets. Raises a syntax error.
pub(crate) fn check(text: &str) -> Result<(), Complaint> {
    // By itself, it cannot close a bracket that it has not opened; between brackets, it cannot be more than an expression. The line
    // break ends a comment that the text may end with.
    if is_one(&format!("select {text}"))? && is_one(&format!("select (\n{text}\n)"))? {
        Ok(())
    } else {
        Err(Complaint::bad_argument("it is not one SQL expression"))
    }
}

/// Whether a text is a single statement that selects one thing from nowhere.
fn is_one(text: &str) -> Result<bool, Complaint> {
    let sql = CString::new(encoding::to_database(text))
        .map_err(|_| Complaint::bad_argument("an expression holds a zero byte"))?;
    // SAFETY: the raw parser on a terminated string gives statements; the node is a SelectStmt where its tag says so.
    Ok(unsafe {
        let statements = pg_sys::raw_parser(sql.as_ptr(), pg_sys::RawParseMode::RAW_PARSE_DEFAULT);
        only(statements).is_some_and(|statement| {
            let select = (*statement.cast::<pg_sys::RawStmt>()).stmt;
            (*select).type_ == pg_sys::NodeTag::T_SelectStmt
                && is_bare(&*select.cast::<pg_sys::SelectStmt>())
        })
    })
}

/// The element of a list that has just one.
///
/// # Safety
/// The list is null or valid.
unsafe fn only(list: *mut pg_sys::List) -> Option<*mut std::ffi::c_void> {
    // SAFETY: as the caller promises; the element exists.
    unsafe { (!list.is_null() && (*list).length == 1).then(|| pg_sys::list_nth(list, 0)) }
}

/// Whether it is `select <one expression>`, and nothing else.
fn is_bare(select: &pg_sys::SelectStmt) -> bool {
    // SAFETY: a list that the parser has made.
    let one = unsafe { only(select.targetList).is_some() };
    one && select.op == pg_sys::SetOperation::SETOP_NONE
        && select.distinctClause.is_null()
        && select.intoClause.is_null()
        && select.fromClause.is_null()
        && select.whereClause.is_null()
        && select.groupClause.is_null()
        && select.havingClause.is_null()
        && select.windowClause.is_null()
        && select.valuesLists.is_null()
        && select.sortClause.is_null()
        && select.limitOffset.is_null()
        && select.limitCount.is_null()
        && select.lockingClause.is_null()
        && select.withClause.is_null()
}
