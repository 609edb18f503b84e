PRAGMA application_id=1635022180;
PRAGMA user_version=1;
BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE hardware (
	"key" VARCHAR(80) NOT NULL, 
	loose VARCHAR(80) NOT NULL, 
	kind TEXT NOT NULL, 
	label TEXT NOT NULL, 
	host TEXT NOT NULL, 
	facts JSON NOT NULL, 
	CONSTRAINT pk_hardware PRIMARY KEY ("key")
);
INSERT INTO "hardware" VALUES('h1:c1b6f72574203e6c3bf92ecd3589bedc','hl1:35f300d1a62fe395a034bc0f2e688eec','cpu','2-core Intel Xeon','feedfeedfeedfeed','{"cores":2,"cpu_model":"Intel(R) Xeon(R) CPU @ 2.20GHz","memory_bytes":8589934592}');
INSERT INTO "hardware" VALUES('h1:28fadc1d7ff6e09bb99a63d9e8fbdc74','hl1:315c30a16b1ad221a002a2e859c5fbea','gpu','4xA100-SXM4-80GB','beefbeefbeefbeef','{"compute_capability":"8.0","count":4,"cuda":null,"driver":"570","links":"NVSwitch","memory_bytes":85899345920,"mig_profile":"off","power_limit_w":400,"product":"NVIDIA A100-SXM4-80GB"}');
CREATE TABLE meta (
	name VARCHAR(80) NOT NULL, 
	value TEXT NOT NULL, 
	CONSTRAINT pk_meta PRIMARY KEY (name)
);
INSERT INTO "meta" VALUES('schema_version','1');
INSERT INTO "meta" VALUES('created_by','unknown');
INSERT INTO "meta" VALUES('database_id','00000000000000000000000000000001');
CREATE TABLE reference_blobs (
	"key" VARCHAR(80) NOT NULL, 
	kind TEXT NOT NULL, 
	facts JSON NOT NULL, 
	blob BLOB NOT NULL, 
	created_at DOUBLE NOT NULL, 
	CONSTRAINT pk_reference_blobs PRIMARY KEY ("key")
);
INSERT INTO "reference_blobs" VALUES('r1:x','quality','{"bits":[4,8]}',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F202122232425262728292A2B2C2D2E2F303132333435363738393A3B3C3D3E3F',1.79612651906894230839e+09);
CREATE TABLE samples (
	trial_id VARCHAR(80) NOT NULL, 
	count INTEGER NOT NULL, 
	blob BLOB NOT NULL, 
	CONSTRAINT pk_samples PRIMARY KEY (trial_id), 
	CONSTRAINT fk_samples_trial_id_trials FOREIGN KEY(trial_id) REFERENCES trials (id) ON DELETE CASCADE
);
INSERT INTO "samples" VALUES('019000000001',1,X'01789C8B8E36D0A9562A292DCA53B232A8D531D131056225A5D8582E865925FE9A0C336F49C730CC7478D1CF3073F996430C33791BBF32CC2CF1D360D8B96BF71E067B200000BD0216D2');
INSERT INTO "samples" VALUES('019000000002',2,X'01789C8B8E36D0A9562A292DCA53B232A8D531D131056225A5589D6843B8B82192782C17C3AC127FCD49B3966F3DCC30F396748CCA4CDEC6AF0C331D5EF47BCE2CF1D36098B97CCBA14920090690840A48820124E1099260D8B96BF79E431F8180C11E06004490321B');
INSERT INTO "samples" VALUES('019000010001',1,X'01789C8B8E36D0A9562A292DCA53B232A8D531D131056225A5D8582E865925FE9A0C336F49C730CC7478D1CF3073F996430C33791BBF32CC2CF1D360D8B96BF71E067B200000BD0216D2');
INSERT INTO "samples" VALUES('019000010002',2,X'01789C8B8E36D0A9562A292DCA53B232A8D531D131056225A5589D6843B8B82192782C17C3AC127FCD49B3966F3DCC30F396748CCA4CDEC6AF0C331D5EF47BCE2CF1D36098B97CCBA14920090690840A48820124E1099260D8B96BF79E431F8180C11E06004490321B');
CREATE TABLE scenarios (
	"key" VARCHAR(80) NOT NULL, 
	measured_key VARCHAR(80) NOT NULL, 
	hardware_key VARCHAR(80) NOT NULL, 
	engine TEXT NOT NULL, 
	engine_build JSON NOT NULL, 
	model JSON NOT NULL, 
	workload JSON NOT NULL, 
	objective JSON NOT NULL, 
	created_at DOUBLE NOT NULL, 
	CONSTRAINT pk_scenarios PRIMARY KEY ("key"), 
	CONSTRAINT fk_scenarios_hardware_key_hardware FOREIGN KEY(hardware_key) REFERENCES hardware ("key")
);
INSERT INTO "scenarios" VALUES('s1:703efb11100a64f4cd803aac6a362155','m1:0823e99db710db8357f4339ce32c88b0','h1:c1b6f72574203e6c3bf92ecd3589bedc','native','{"torch":"2.9","version":"1.0"}','{"digest":"abc","name":"small"}','{"name":"chat","requests":8}','{"name":"throughput"}',1000.0);
INSERT INTO "scenarios" VALUES('s1:f610eaa1ad9fed4ead4350d43170add8','m1:889335321e7a1f2b3a331e6822bfcee1','h1:28fadc1d7ff6e09bb99a63d9e8fbdc74','native','{"torch":"2.9","version":"1.0"}','{"digest":"without a name"}','{"deep":{"a":true},"name":"é 😀 ''; --","rates":[1,2.5,null]}','{"name":"throughput"}',1000.0);
CREATE TABLE trials (
	id VARCHAR(80) NOT NULL, 
	scenario_key VARCHAR(80) NOT NULL, 
	stage TEXT NOT NULL, 
	config JSON NOT NULL, 
	config_key VARCHAR(80) NOT NULL, 
	status TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	metrics JSON NOT NULL, 
	seconds JSON NOT NULL, 
	effective JSON NOT NULL, 
	counters JSON NOT NULL, 
	block INTEGER NOT NULL, 
	seed BIGINT NOT NULL, 
	started_at DOUBLE NOT NULL, 
	ended_at DOUBLE NOT NULL, 
	provenance JSON NOT NULL, 
	counted BOOLEAN NOT NULL, 
	CONSTRAINT pk_trials PRIMARY KEY (id), 
	CONSTRAINT fk_trials_scenario_key_scenarios FOREIGN KEY(scenario_key) REFERENCES scenarios ("key")
);
INSERT INTO "trials" VALUES('019000000000','s1:703efb11100a64f4cd803aac6a362155','search','{"graphs":true,"kv_dtype":"int8","max_seqs":8,"share":0.5}','c1:0','ok','','{"tokens_per_s":100.0,"ttft_p99":0.25}','{"launch":1.5}','{"kv_dtype":"int8","layers":[1,2]}','{"tokens":12}',0,7,1000.0,1002.5,'{"pid":1}',1);
INSERT INTO "trials" VALUES('019000000001','s1:703efb11100a64f4cd803aac6a362155','confirm','{"graphs":true,"kv_dtype":"int8","max_seqs":8,"share":0.5}','c1:1','ok','','{"tokens_per_s":100.0,"ttft_p99":0.25}','{"launch":1.5}','{"kv_dtype":"int8","layers":[1,2]}','{"tokens":12}',1,7,1000.0,1002.5,'{"pid":1}',1);
INSERT INTO "trials" VALUES('019000000002','s1:703efb11100a64f4cd803aac6a362155','confirm','{"graphs":true,"kv_dtype":"int8","max_seqs":8,"share":0.5}','c1:2','crash','dies: é ''quoted''
next line','{"tokens_per_s":100.0,"ttft_p99":0.25}','{"launch":1.5}','{"kv_dtype":"int8","layers":[1,2]}','{"tokens":12}',2,7,1000.0,1002.5,'{"pid":1}',1);
INSERT INTO "trials" VALUES('019000010000','s1:f610eaa1ad9fed4ead4350d43170add8','search','{"graphs":true,"kv_dtype":"int8","max_seqs":8,"share":0.5}','c1:0','ok','','{"tokens_per_s":100.0,"ttft_p99":0.25}','{"launch":1.5}','{"kv_dtype":"int8","layers":[1,2]}','{"tokens":12}',0,7,1000.0,1002.5,'{"pid":1}',1);
INSERT INTO "trials" VALUES('019000010001','s1:f610eaa1ad9fed4ead4350d43170add8','confirm','{"graphs":true,"kv_dtype":"int8","max_seqs":8,"share":0.5}','c1:1','ok','','{"tokens_per_s":100.0,"ttft_p99":0.25}','{"launch":1.5}','{"kv_dtype":"int8","layers":[1,2]}','{"tokens":12}',1,7,1000.0,1002.5,'{"pid":1}',1);
INSERT INTO "trials" VALUES('019000010002','s1:f610eaa1ad9fed4ead4350d43170add8','confirm','{"graphs":true,"kv_dtype":"int8","max_seqs":8,"share":0.5}','c1:2','crash','dies: é ''quoted''
next line','{"tokens_per_s":100.0,"ttft_p99":0.25}','{"launch":1.5}','{"kv_dtype":"int8","layers":[1,2]}','{"tokens":12}',2,7,1000.0,1002.5,'{"pid":1}',1);
CREATE INDEX ix_hardware_loose ON hardware (loose);
CREATE INDEX ix_scenarios_measured_key ON scenarios (measured_key);
CREATE INDEX ix_scenarios_hardware_key ON scenarios (hardware_key);
CREATE INDEX ix_trials_config_key ON trials (config_key);
CREATE INDEX ix_trials_ended_at ON trials (ended_at);
CREATE INDEX ix_trials_scenario_key_stage_id ON trials (scenario_key, stage, id);
CREATE UNIQUE INDEX uq_trials_counted_search ON trials (scenario_key, config_key) WHERE stage = 'search' AND counted = 1;
CREATE INDEX ix_reference_blobs_kind ON reference_blobs (kind);
COMMIT;
