"""Sources of questions: .xlsx, .csv, .jsonl and .parquet files, folders of them, a database.

Every kind is read as a stream of `records.Record`, from which `qinglan.data.workbook` makes rows.
"""
