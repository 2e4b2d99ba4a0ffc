//! Whose rights code runs with.

use std::ffi::CStr;

use pgrx::pg_sys;

use super::exact::Printed;

/// Where names of our own statements are looked up, whatever the session's search_path says.
pub(crate) const OUR_PATH: &CStr = c"pg_catalog, outbox, pg_temp";

/// How a worker's own statements are planned: the same way whatever the statistics say, by the indexes that were made for them.
pub(super) const OUR_PLANNING: [(&CStr, &str); 4] = [
    (c"enable_seqscan", "off"),
    (c"enable_bitmapscan", "off"),
    (c"plan_cache_mode", "force_generic_plan"),
    (c"jit", "off"),
];

/// How long a worker's own statements wait for a lock: for a moment of somebody else's, and not until an idle transaction ends.
pub(super) const OUR_PATIENCE: (&CStr, &str) = (c"lock_timeout", "100ms");

/// Puts user, security context and settings back when it goes out of scope after success. After an error the end of the
/// (sub)transaction does the same.
struct Back {
    user: pg_sys::Oid,
    context: i32,
    nest: i32,
}

impl Back {
    fn remember() -> Self {
        let mut user = pg_sys::InvalidOid;
        let mut context = 0;
        // SAFETY: fills two locals; the nest level is closed in `restore`.
        unsafe {
            pg_sys::GetUserIdAndSecContext(&raw mut user, &raw mut context);
            Self {
                user,
                context,
                nest: pg_sys::NewGUCNestLevel(),
            }
        }
    }

    fn restore(self) {
        // SAFETY: the values were read by `remember` in the same (sub)transaction.
        unsafe {
            pg_sys::AtEOXact_GUC(false, self.nest);
            pg_sys::SetUserIdAndSecContext(self.user, self.context);
        }
    }
}

fn set_local(name: &CStr, value: &CStr) {
    set_local_or_reset(name, Some(value));
}

/// Without a value it goes back to what the configuration says.
fn set_local_or_reset(name: &CStr, value: Option<&CStr>) {
    // SAFETY: static strings; GUC_ACTION_SAVE ends with the nest level.
    unsafe {
        pg_sys::set_config_option(
            name.as_ptr(),
            value.map_or(std::ptr::null(), CStr::as_ptr),
            pg_sys::GucContext::PGC_SUSET,
            pg_sys::GucSource::PGC_S_SESSION,
            pg_sys::GucAction::GUC_ACTION_SAVE,
            true,
            0,
            false,
        );
    }
}

/// What SQL means must not depend on the session that it happens to run in, so this goes with every change of the user.
fn set_language(path: &CStr) {
    set_local(c"search_path", path);
    set_local(c"standard_conforming_strings", c"on");
    set_local(c"transform_null_equals", c"off");
}

/// Runs our own statements with the rights of the extension and a search_path of our own, for a caller whose privilege has been
/// checked. `body` must not fire what the caller has deferred: `set constraints` would run the caller's triggers with our rights.
pub(crate) fn as_extension<R>(body: impl FnOnce() -> R) -> R {
    let back = Back::remember();
    let owner = pg_sys::Oid::from(pg_sys::BOOTSTRAP_SUPERUSERID);
    set_language(OUR_PATH);
    // SAFETY: the context keeps SET ROLE and the like out.
    unsafe {
        pg_sys::SetUserIdAndSecContext(
            owner,
            back.context | pg_sys::SECURITY_LOCAL_USERID_CHANGE.cast_signed(),
        )
    };
    let result = body();
    back.restore();
    result
}

/// How values are printed the same way in every session.
const OUR_PRINTING: [(&CStr, &CStr); 8] = [
    (c"TimeZone", c"UTC"),
    (c"DateStyle", c"ISO, MDY"),
    (c"IntervalStyle", c"postgres"),
    (c"extra_float_digits", c"1"),
    (c"bytea_output", c"hex"),
    (c"lc_monetary", c"C"),
    (c"quote_all_identifiers", c"off"),
    (c"search_path", OUR_PATH),
];

fn is_set_to(name: &CStr, value: &CStr) -> bool {
    // SAFETY: the setting exists; its text is compared before anything can change it.
    unsafe {
        let current = pg_sys::GetConfigOption(name.as_ptr(), false, false);
        !current.is_null() && CStr::from_ptr(current) == value
    }
}

/// Runs a statement of ours that names everything with its schema and has no literal with a backslash, with the rights of the
/// extension; it happens with every write to a captured table, so no more is set than it needs. Values are printed the same way
/// whatever the session says.
pub(crate) fn as_extension_printing<R>(printed: Printed, body: impl FnOnce() -> R) -> R {
    let settings = match printed {
        Printed::Always => &[],
        Printed::ByZone => &OUR_PRINTING[..1],
        Printed::BySettings => &OUR_PRINTING[..],
    };
    let back = Back::remember();
    for (name, value) in settings {
        // Most servers have one of these names for it, and setting a zone is not for nothing.
        let is_utc = || *name == c"TimeZone" && is_set_to(name, c"Etc/UTC");
        if !is_set_to(name, value) && !is_utc() {
            set_local(name, value);
        }
    }
    let owner = pg_sys::Oid::from(pg_sys::BOOTSTRAP_SUPERUSERID);
    let context = back.context | pg_sys::SECURITY_LOCAL_USERID_CHANGE.cast_signed();
    // SAFETY: as in `as_extension`.
    unsafe { pg_sys::SetUserIdAndSecContext(owner, context) };
    let result = body();
    back.restore();
    result
}

/// How names are looked up in what a user supplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// Only pg_catalog and outbox: an expression whose other names are qualified.
    Ours,
    /// As a session starts with: for functions that were written to be called from one. Temporary objects come last here too,
    /// for they are those of whoever owns the session, and that may be another role than the one that supplied the function.
    Session,
}

impl Path {
    fn names(self) -> &'static CStr {
        match self {
            Path::Ours => OUR_PATH,
            Path::Session => c"\"$user\", public, pg_temp",
        }
    }
}

/// Runs what a user supplied with that user's rights, in a security-restricted context: it can neither become somebody else nor
/// leave something behind that runs later with our rights.
pub(crate) fn as_role<R>(role: pg_sys::Oid, path: Path, body: impl FnOnce() -> R) -> R {
    let back = Back::remember();
    set_language(path.names());
    // SAFETY: a plain global, set once when a worker starts.
    if unsafe { !pg_sys::MyBgworkerEntry.is_null() } {
        for (name, _) in OUR_PLANNING {
            set_local_or_reset(name, None);
        }
        set_local_or_reset(OUR_PATIENCE.0, None);
    }
    let restricted = back.context
        | pg_sys::SECURITY_LOCAL_USERID_CHANGE.cast_signed()
        | pg_sys::SECURITY_RESTRICTED_OPERATION.cast_signed();
    // SAFETY: the role exists, as the caller has checked.
    unsafe { pg_sys::SetUserIdAndSecContext(role, restricted) };
    let result = body();
    back.restore();
    result
}

/// Runs a statement of ours on a table whose owner has added code of their own: as that owner, and restricted as in [`as_role`] unless
/// the table `defers` some of that code to the end of the transaction, which a restricted context does not allow.
pub(crate) fn as_table_owner<R>(owner: pg_sys::Oid, defers: bool, body: impl FnOnce() -> R) -> R {
    if !defers {
        return as_role(owner, Path::Ours, body);
    }
    let back = Back::remember();
    set_language(OUR_PATH);
    let context = back.context | pg_sys::SECURITY_LOCAL_USERID_CHANGE.cast_signed();
    // SAFETY: a table's owner exists.
    unsafe { pg_sys::SetUserIdAndSecContext(owner, context) };
    let result = body();
    back.restore();
    result
}

/// The role whose rights are in force.
pub(crate) fn current_role() -> pg_sys::Oid {
    // SAFETY: reads a global.
    unsafe { pg_sys::GetUserId() }
}

/// Whether `role` has the rights of `of`: is it, is a member that inherits, or is a superuser.
pub(crate) fn has_rights_of(role: pg_sys::Oid, of: pg_sys::Oid) -> bool {
    // SAFETY: catalog look-ups in a transaction.
    unsafe { pg_sys::has_privs_of_role(role, of) }
}

/// Whether the session looks names up nowhere, as the scripts of pg_dump do.
pub(crate) fn has_no_path() -> bool {
    is_set_to(c"search_path", c"")
}

/// Whether code that a user supplied is running: what must not be done from in there asks for it.
pub(crate) fn is_restricted() -> bool {
    // SAFETY: reads a global.
    unsafe { pg_sys::InSecurityRestrictedOperation() }
}

/// Whether a role may have the server read a file that it names.
pub(crate) fn may_read_files(role: pg_sys::Oid) -> bool {
    has_rights_of(role, pg_sys::Oid::from(pg_sys::ROLE_PG_READ_SERVER_FILES))
}

/// Whether a role is a superuser.
pub(crate) fn is_superuser(role: pg_sys::Oid) -> bool {
    // SAFETY: a catalog look-up in a transaction.
    unsafe { pg_sys::superuser_arg(role) }
}

/// Whether a role may do as the system's user that runs the server does: log in elsewhere as that user, too.
pub(crate) fn may_be_server(role: pg_sys::Oid) -> bool {
    has_rights_of(
        role,
        pg_sys::Oid::from(pg_sys::ROLE_PG_EXECUTE_SERVER_PROGRAM),
    )
}
