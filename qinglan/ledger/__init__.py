"""The ledger: every paid call, by the hash of what was asked.

A SQLite file (WAL) on one machine, a PostgreSQL database for several. Every answer is committed
before anyone uses it, so a killed process loses at most the calls in flight. Who is about to ask
takes a claim first, so that two processes don't pay for the same answer; a claim ends with its
process. Unusable answers are kept too, as asking again would pay again, and for a time the RAG's
answers to the samples of RL.
"""

from qinglan.ledger.database import LEDGER_FILE, SCHEMA_VERSION, ledger_url
from qinglan.ledger.records import BatchJob, Call, Delivery, Failure, Order, Retrieval, Usage
from qinglan.ledger.store import BATCH, SIMULATED, Ledger
