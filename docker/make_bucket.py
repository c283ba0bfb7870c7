"""Makes the bucket of MLflow's artifacts, unless it is there.

Address and keys stand in MLflow's own variables.
"""

import os
import sys

import boto3
from botocore.exceptions import ClientError


def main(bucket: str) -> None:
    """Make the bucket of this name."""
    s3 = boto3.client("s3", endpoint_url=os.environ["MLFLOW_S3_ENDPOINT_URL"])
    try:
        s3.head_bucket(Bucket=bucket)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
            raise
        s3.create_bucket(Bucket=bucket)


if __name__ == "__main__":
    main(sys.argv[1])
