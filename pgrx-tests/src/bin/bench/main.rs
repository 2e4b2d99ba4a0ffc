//! The benches of pg_outbox: each figure from a run of its own on a fresh cluster, all of them in one table.
//!
//! Owns the list of figures and what the command line says. How a figure is measured is the business of its module.
#![forbid(unsafe_code)]

mod backfill;
mod brokers;
mod capture;
mod depth;
mod drain;
mod endpoint;
mod held;
mod idle;
mod latency;
mod machine;
mod processes;
mod profile;
mod pull;
mod report;
mod rows;
mod single;
mod stage;
mod triggers;
mod webhooks;

use std::process::exit;
use std::time::Duration;

use report::Line;

/// How thoroughly figures are measured.
pub(crate) struct Run {
    quick: bool,
    /// Repeat what is measured for that long and sample where the time goes, instead of measuring.
    profile: Option<Duration>,
}

impl Run {
    /// Settings that a cluster gets on top of the usual ones.
    pub(crate) fn settings(&self) -> &'static [(&'static str, &'static str)] {
        match self.profile {
            Some(_) => profile::SETTINGS,
            None => &[],
        }
    }

    /// `full`, or `quick` if little time is to be spent.
    pub(crate) fn of<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }
}

struct Figure {
    name: &'static str,
    about: &'static str,
    run: fn(&Run) -> Vec<Line>,
}

const FIGURES: &[Figure] = &[
    Figure {
        name: "drain-function",
        about: "a backlog of 500,000 events into a table, by a sink of kind function, and the latency to it",
        run: drain::function,
    },
    Figure {
        name: "drain-http",
        about: "the same over HTTP, unsigned and signed",
        run: drain::http,
    },
    Figure {
        name: "drain-single",
        about: "200,000 events over HTTP, a request each, and the latency to the receiver",
        run: single::figure,
    },
    Figure {
        name: "drain-postgres",
        about: "a backlog of 200,000 events into a table of another PostgreSQL, and the latency to it",
        run: drain::postgres,
    },
    Figure {
        name: "drain-nats",
        about: "a backlog of 500,000 events to JetStream, and the latency to a subscriber",
        run: brokers::nats_figure,
    },
    Figure {
        name: "drain-kafka",
        about: "the same to a Kafka broker, and the latency to a consumer",
        run: brokers::kafka_figure,
    },
    Figure {
        name: "pull",
        about: "the same by outbox.poll and outbox.ack, beside PgQ",
        run: pull::figure,
    },
    Figure {
        name: "latency",
        about: "from commit to the receiver, at 20/s and at 1,000/s",
        run: latency::figure,
    },
    Figure {
        name: "depth",
        about: "time per batch with 10,000 and with 5 million events stored",
        run: depth::figure,
    },
    Figure {
        name: "capture",
        about: "what writing an event costs a transaction, by pgbench",
        run: capture::figure,
    },
    Figure {
        name: "triggers",
        about: "what capture adds to writing single rows, and 100,000 at once",
        run: triggers::figure,
    },
    Figure {
        name: "backfill",
        about: "200,000 rows that are there already, to one sink, alone and while four clients write",
        run: backfill::figure,
    },
    Figure {
        name: "held",
        about: "drain and latency while an old snapshot is held open",
        run: held::figure,
    },
    Figure {
        name: "webhooks",
        about: "1,000 endpoints of tenants, with and without a tenth that hang and a tenth that fail",
        run: webhooks::figure,
    },
    Figure {
        name: "idle",
        about: "what three sinks cost when nothing happens",
        run: idle::figure,
    },
];

fn main() {
    let (run, figures) = arguments();
    println!("{}", machine::described());
    let mut lines = Vec::new();
    for figure in figures {
        eprintln!(
            "==> {}: {}   ({})",
            figure.name,
            figure.about,
            machine::load()
        );
        let measured = (figure.run)(&run);
        for line in &measured {
            eprintln!("    {line}");
        }
        lines.extend(measured);
    }
    if !lines.is_empty() {
        println!("\n{}", report::table(&lines));
    }
}

fn arguments() -> (Run, Vec<&'static Figure>) {
    let mut run = Run {
        quick: false,
        profile: None,
    };
    let mut figures = Vec::new();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--quick" => run.quick = true,
            "--profile" => {
                let seconds = args.next().and_then(|seconds| seconds.parse().ok());
                let seconds =
                    seconds.unwrap_or_else(|| refuse("--profile needs a number of seconds"));
                run.profile = Some(Duration::from_secs(seconds));
            }
            "--list" => {
                for figure in FIGURES {
                    println!("{:<16}{}", figure.name, figure.about);
                }
                exit(0);
            }
            name => match FIGURES.iter().find(|figure| figure.name == name) {
                Some(figure) => figures.push(figure),
                None => refuse(&format!("there is no figure {name}; --list names them")),
            },
        }
    }
    if figures.is_empty() {
        figures.extend(FIGURES);
    }
    (run, figures)
}

fn refuse(problem: &str) -> ! {
    eprintln!("error: {problem}");
    exit(2);
}
