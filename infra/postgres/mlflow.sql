-- Run once, when the volume is empty: POSTGRES_DB makes Prefect's database, this makes MLflow's.
CREATE DATABASE mlflow;
