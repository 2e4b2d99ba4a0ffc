//! The I/O thread: runs the sinks' network clients, away from Postgres.
//!
//! Orders come in over one channel, reports go out over another, and a descriptor wakes the main thread. Each sink has at most three
//! deliveries in flight (of its stream, of what is parked, of a dead letter), and attempts at webhooks are bounded by their pool, so
//! all stay short.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc as std_mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use crate::dispatch::{Outcome, Refusal};
use crate::pg::latch::{self, EventFd};
use crate::sinks::webhook::{Attempt, Courier, Outcome as AttemptOutcome, Verdict};
use crate::sinks::{Batch, Came, Client, Config, Defaults};

/// How soon the main thread learns what is through of a delivery that goes on.
const TELL_WITHIN: Duration = Duration::from_millis(40);

enum Order {
    Open {
        sink: String,
        config: Box<Config>,
        defaults: Defaults,
    },
    Deliver {
        sink: String,
        serial: u64,
        batch: Batch,
    },
    Close {
        sink: String,
    },
    Attempt {
        id: i64,
        courier: Arc<Courier>,
        attempt: Box<Attempt>,
    },
}

/// What an attempt at a webhook came to.
pub(crate) struct Attempted {
    pub(crate) id: i64,
    pub(crate) outcome: AttemptOutcome,
}

/// What a delivery came to.
pub(crate) struct Report {
    pub(crate) sink: String,
    /// As it was handed over; a report of a delivery that was given up is of no interest.
    pub(crate) serial: u64,
    pub(crate) came: Came,
}

/// The main thread's end.
pub(crate) struct Io {
    orders: Option<mpsc::UnboundedSender<Order>>,
    reports: std_mpsc::Receiver<Report>,
    attempted: std_mpsc::Receiver<Attempted>,
    wake: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Io {
    /// Starts the thread.
    pub(crate) fn start() -> std::io::Result<Self> {
        let wake = Arc::new(EventFd::new()?);
        let (orders, incoming) = mpsc::unbounded_channel();
        let (outgoing, reports) = std_mpsc::channel();
        let (told, attempted) = std_mpsc::channel();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let reporter = Reporter {
            reports: outgoing,
            attempted: told,
            wake: Arc::clone(&wake),
        };
        let thread = latch::without_signals(|| {
            std::thread::Builder::new()
                .name("outbox io".to_owned())
                .spawn(move || {
                    runtime.block_on(serve(incoming, reporter));
                    // A look-up of a name that hangs must not hold up the end of the process.
                    runtime.shutdown_background();
                })
        })?;
        Ok(Self {
            orders: Some(orders),
            reports,
            attempted,
            wake,
            thread: Some(thread),
        })
    }

    fn order(&self, order: Order) {
        if let Some(orders) = &self.orders {
            // The thread ends only after this end is gone.
            let _ = orders.send(order);
        }
    }

    /// A sink is new or has changed: deliveries from now on go by this configuration.
    pub(crate) fn open(&self, sink: &str, config: &Config, defaults: Defaults) {
        self.order(Order::Open {
            sink: sink.to_owned(),
            config: Box::new(config.clone()),
            defaults,
        });
    }

    /// Hands over a batch; a report follows. Before, its watch may have news.
    pub(crate) fn deliver(&self, sink: &str, serial: u64, batch: Batch) {
        self.order(Order::Deliver {
            sink: sink.to_owned(),
            serial,
            batch,
        });
    }

    /// Gives up what is in flight to a sink and closes its connections.
    pub(crate) fn close(&self, sink: &str) {
        self.order(Order::Close {
            sink: sink.to_owned(),
        });
    }

    /// Hands over an attempt at a webhook; many may be under way. What it came to follows.
    pub(crate) fn attempt(&self, id: i64, courier: &Arc<Courier>, attempt: Attempt) {
        self.order(Order::Attempt {
            id,
            courier: Arc::clone(courier),
            attempt: Box::new(attempt),
        });
    }

    /// Attempts that have ended. To be asked for after [`Io::reports`], which forgets the wake-up.
    pub(crate) fn attempted(&self) -> Vec<Attempted> {
        self.attempted.try_iter().collect()
    }

    /// Becomes readable when there are reports, or news of a delivery.
    pub(crate) fn readable(&self) -> &EventFd {
        &self.wake
    }

    /// The reports that have come in.
    pub(crate) fn reports(&self) -> Vec<Report> {
        self.wake.clear();
        self.reports.try_iter().collect()
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Clone)]
struct Reporter {
    reports: std_mpsc::Sender<Report>,
    attempted: std_mpsc::Sender<Attempted>,
    wake: Arc<EventFd>,
}

impl Reporter {
    fn report(&self, report: Report) {
        let _ = self.reports.send(report);
        self.wake.set();
    }
}

/// Reports a failure if the delivery ends without an outcome, as after a panic.
struct Promise {
    reporter: Reporter,
    sink: String,
    serial: u64,
    kept: bool,
}

impl Promise {
    fn keep(mut self, came: Came) {
        self.kept = true;
        self.report(came);
    }

    fn report(&mut self, came: Came) {
        self.reporter.report(Report {
            sink: std::mem::take(&mut self.sink),
            serial: self.serial,
            came,
        });
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if !self.kept {
            let error = "the delivery ended without an outcome".to_owned();
            let outcome = Outcome::Failed(Refusal {
                error,
                retry_after: None,
            });
            self.report(Came::To(outcome));
        }
    }
}

/// Tells what an attempt came to when it ends, in whatever way.
struct Tell {
    reporter: Reporter,
    id: i64,
    outcome: Option<AttemptOutcome>,
}

impl Drop for Tell {
    fn drop(&mut self) {
        let outcome = self.outcome.take().unwrap_or_else(|| AttemptOutcome {
            status: None,
            duration: Duration::ZERO,
            verdict: Verdict::Failed {
                error: "the attempt ended without an outcome".to_owned(),
                retry_after: None,
            },
        });
        let _ = self.reporter.attempted.send(Attempted {
            id: self.id,
            outcome,
        });
        self.reporter.wake.set();
    }
}

struct Open {
    client: Result<Arc<Client>, String>,
    in_flight: Vec<AbortHandle>,
}

impl Drop for Open {
    fn drop(&mut self) {
        for task in &self.in_flight {
            task.abort();
        }
    }
}

/// The thread's loop; ends, and gives up what is in flight, when the main thread's end is gone.
async fn serve(mut orders: mpsc::UnboundedReceiver<Order>, reporter: Reporter) {
    let mut open: HashMap<String, Open> = HashMap::new();
    while let Some(order) = orders.recv().await {
        match order {
            Order::Open {
                sink,
                config,
                defaults,
            } => {
                let client = Client::open(&config, &defaults).map(Arc::new);
                // What is in flight goes on as it began.
                let before = open.get_mut(&sink);
                let in_flight = before.map(|open| std::mem::take(&mut open.in_flight));
                let in_flight = in_flight.unwrap_or_default();
                open.insert(sink, Open { client, in_flight });
            }
            Order::Close { sink } => {
                open.remove(&sink);
            }
            Order::Attempt {
                id,
                courier,
                attempt,
            } => {
                let tell = Tell {
                    reporter: reporter.clone(),
                    id,
                    outcome: None,
                };
                tokio::spawn(async move {
                    // All of it, so that it tells also when the task is given up.
                    let mut tell = tell;
                    tell.outcome = Some(courier.send(&attempt).await);
                });
            }
            Order::Deliver {
                sink,
                serial,
                batch,
            } => {
                let promise = Promise {
                    reporter: reporter.clone(),
                    sink: sink.clone(),
                    serial,
                    kept: false,
                };
                let Some(entry) = open.get_mut(&sink) else {
                    continue;
                };
                match &entry.client {
                    Ok(client) => {
                        let client = Arc::clone(client);
                        let task = tokio::spawn(deliver(client, batch, promise));
                        entry.in_flight.retain(|task| !task.is_finished());
                        entry.in_flight.push(task.abort_handle());
                    }
                    Err(error) => {
                        promise.keep(Came::To(Outcome::Failed(Refusal {
                            error: error.clone(),
                            retry_after: None,
                        })));
                    }
                }
            }
        }
    }
}

async fn deliver(client: Arc<Client>, batch: Batch, promise: Promise) {
    let delivery = client.deliver(&batch);
    tokio::pin!(delivery);
    let came = loop {
        tokio::select! {
            came = &mut delivery => break came,
            () = tokio::time::sleep(TELL_WITHIN) => {
                if batch.watch.has_news() {
                    promise.reporter.wake.set();
                }
            }
        }
    };
    promise.keep(came);
}
