BEGIN TRANSACTION;
CREATE TABLE batches (
	digest TEXT NOT NULL, 
	server TEXT NOT NULL, 
	role TEXT NOT NULL, 
	status TEXT NOT NULL, 
	batch_id TEXT NOT NULL, 
	request_hashes JSON NOT NULL, 
	created_s DOUBLE NOT NULL, 
	PRIMARY KEY (digest)
);
INSERT INTO "batches" VALUES('d','s','teacher','submitted','b1','["c"]',1.0);
CREATE TABLE calls (
	id INTEGER NOT NULL, 
	request_hash TEXT NOT NULL, 
	run_id TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	role TEXT NOT NULL, 
	model TEXT NOT NULL, 
	text TEXT NOT NULL, 
	reasoning TEXT, 
	refusal TEXT, 
	finish_reason TEXT NOT NULL, 
	prompt_tokens INTEGER NOT NULL, 
	completion_tokens INTEGER NOT NULL, 
	cost_usd DOUBLE NOT NULL, 
	latency_ms DOUBLE, 
	created_s DOUBLE NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "calls" VALUES(1,'a','r','t','teacher','m','改写',NULL,NULL,'stop',100,10,0.25,12.5,1790000000.0);
INSERT INTO "calls" VALUES(2,'b','r','t','teacher','m','改写','想',NULL,'stop',100,10,0.25,12.5,1790000000.0);
CREATE TABLE claims (
	request_hash TEXT NOT NULL, 
	holder TEXT, 
	PRIMARY KEY (request_hash)
);
INSERT INTO "claims" VALUES('c','batch:1');
CREATE TABLE failures (
	id INTEGER NOT NULL, 
	request_hash TEXT NOT NULL, 
	run_id TEXT NOT NULL, 
	tenant TEXT NOT NULL, 
	role TEXT NOT NULL, 
	model TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	latency_ms DOUBLE, 
	created_s DOUBLE NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "failures" VALUES(1,'a','r','t','teacher','m','http_500',NULL,1790000000.0);
CREATE TABLE holders (
	holder TEXT NOT NULL, 
	seen_s DOUBLE NOT NULL, 
	PRIMARY KEY (holder)
);
CREATE TABLE ledger_meta (
	version INTEGER NOT NULL, 
	PRIMARY KEY (version)
);
INSERT INTO "ledger_meta" VALUES(1);
CREATE TABLE spent (
	period TEXT NOT NULL, 
	usd DOUBLE NOT NULL, 
	PRIMARY KEY (period)
);
INSERT INTO "spent" VALUES('month:2026-09',0.5);
INSERT INTO "spent" VALUES('run:r',0.5);
CREATE INDEX ix_calls_request_hash ON calls (request_hash);
CREATE INDEX calls_by_run ON calls (run_id, role);
CREATE INDEX failures_by_run ON failures (run_id, role);
CREATE INDEX ix_failures_request_hash ON failures (request_hash);
CREATE INDEX ix_claims_holder ON claims (holder);
COMMIT;
