//! Rows that go from the executor straight into a tuplestore, such as the result of a set-returning function, without being kept in between.

use std::ptr;

use pgrx::pg_sys;

use super::super::call::TupleStore;
use super::{Arg, Spi, UserStatement, plan};

/// What went by.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Stored {
    /// How many rows.
    pub(crate) count: u64,
    /// The first two columns of the last row, an xid8 and a bigint.
    pub(crate) last: Option<(u64, i64)>,
}

/// What the executor hands rows to. It is given the address of `base`.
#[repr(C)]
struct Receiver {
    base: pg_sys::DestReceiver,
    store: *mut pg_sys::Tuplestorestate,
    stored: Stored,
}

impl Spi {
    /// Reads with a kept plan, and puts every row into `store`. The columns are those that the function declares, and begin with an
    /// xid8 and a bigint that are never null.
    pub(crate) fn read_into(&self, store: &TupleStore, sql: &str, args: &[Arg]) -> Stored {
        let plan = plan(sql, args);
        let mut receiver = Receiver {
            base: pg_sys::DestReceiver {
                receiveSlot: Some(receive),
                rStartup: Some(start),
                rShutdown: Some(end),
                rDestroy: Some(end),
                mydest: pg_sys::CommandDest::DestTuplestore,
            },
            store: store.state(),
            stored: Stored::default(),
        };
        // SAFETY: connected to SPI; the plan was prepared for these types. The receiver outlives the call, and nobody else refers to it
        // while Postgres does.
        unsafe {
            let params = pg_sys::makeParamList(args.len() as i32);
            let slots = (*params).params.as_mut_ptr();
            for (index, arg) in args.iter().enumerate() {
                let datum = arg.datum();
                *slots.add(index) = pg_sys::ParamExternData {
                    value: datum.unwrap_or(pg_sys::Datum::from(0)),
                    isnull: datum.is_none(),
                    pflags: pg_sys::PARAM_FLAG_CONST as u16,
                    ptype: arg.type_oid(),
                };
            }
            let options = pg_sys::SPIExecuteOptions {
                params,
                read_only: true,
                dest: &raw mut receiver.base,
                ..pg_sys::SPIExecuteOptions::default()
            };
            let status = pg_sys::SPI_execute_plan_extended(plan, &raw const options);
            assert!(status >= 0, "SPI_execute_plan_extended failed: {status}");
            ptr::read_volatile(&raw const receiver.stored)
        }
    }
}

/// What makes a store for the rows that it is handed. It is given the address of `base`.
#[repr(C)]
struct Collector {
    base: pg_sys::DestReceiver,
    store: *mut pg_sys::Tuplestorestate,
    columns: pg_sys::TupleDesc,
}

impl Spi {
    /// Runs a user's statement and puts its rows into a store, which spills as the executor's do and lives as long as the
    /// (sub)transaction; returns it with what it holds.
    pub(in super::super) fn collect(
        &self,
        statement: &UserStatement,
    ) -> (*mut pg_sys::Tuplestorestate, pg_sys::TupleDesc) {
        let plan = statement.plan(&[]);
        let mut collector = Collector {
            base: pg_sys::DestReceiver {
                receiveSlot: Some(collect),
                rStartup: Some(begin_collecting),
                rShutdown: Some(end),
                rDestroy: Some(end),
                mydest: pg_sys::CommandDest::DestTuplestore,
            },
            store: ptr::null_mut(),
            columns: ptr::null_mut(),
        };
        // SAFETY: connected to SPI; the plan has no parameters. The collector outlives the call, and nobody else refers to it while
        // Postgres does.
        unsafe {
            let options = pg_sys::SPIExecuteOptions {
                dest: &raw mut collector.base,
                ..pg_sys::SPIExecuteOptions::default()
            };
            let status = pg_sys::SPI_execute_plan_extended(plan, &raw const options);
            assert!(status >= 0, "SPI_execute_plan_extended failed: {status}");
            let store = ptr::read_volatile(&raw const collector.store);
            assert!(!store.is_null(), "a statement returns no rows");
            (store, ptr::read_volatile(&raw const collector.columns))
        }
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn begin_collecting(
    receiver: *mut pg_sys::DestReceiver,
    _operation: i32,
    columns: pg_sys::TupleDesc,
) {
    // SAFETY: the executor calls it with the receiver that it was given, the first field of ours. What is made outlives the executor.
    unsafe {
        let collector = receiver.cast::<Collector>();
        let before = pg_sys::MemoryContextSwitchTo(pg_sys::CurTransactionContext);
        (*collector).columns = pg_sys::CreateTupleDescCopy(columns);
        (*collector).store = pg_sys::tuplestore_begin_heap(false, false, pg_sys::work_mem);
        pg_sys::MemoryContextSwitchTo(before);
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn collect(
    slot: *mut pg_sys::TupleTableSlot,
    receiver: *mut pg_sys::DestReceiver,
) -> bool {
    // SAFETY: as above. The store copies the row.
    unsafe { pg_sys::tuplestore_puttupleslot((*receiver.cast::<Collector>()).store, slot) };
    true
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn receive(
    slot: *mut pg_sys::TupleTableSlot,
    receiver: *mut pg_sys::DestReceiver,
) -> bool {
    // SAFETY: the executor calls it with the receiver that it was given, the first field of ours, and with a slot that holds a row of
    // two columns at least. The store copies the row.
    unsafe {
        let receiver = receiver.cast::<Receiver>();
        pg_sys::tuplestore_puttupleslot((*receiver).store, slot);
        if (*slot).tts_nvalid < 2 {
            pg_sys::slot_getsomeattrs_int(slot, 2);
        }
        let values = (*slot).tts_values;
        (*receiver).stored.last = Some(((*values).value() as u64, (*values.add(1)).value() as i64));
        (*receiver).stored.count += 1;
    }
    true
}

unsafe extern "C-unwind" fn start(
    _receiver: *mut pg_sys::DestReceiver,
    _operation: i32,
    _columns: pg_sys::TupleDesc,
) {
}

unsafe extern "C-unwind" fn end(_receiver: *mut pg_sys::DestReceiver) {}
