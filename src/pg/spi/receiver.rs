//! Rows that go from the executor straight into the result of a set-returning function, without being kept in between.

use std::ptr;

use pgrx::pg_sys;

use super::super::call::TupleStore;
use super::{Arg, Spi, plan};

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
